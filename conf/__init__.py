"""The Hydra configuration of hires, as data: groups of YAML files that hold differences only."""

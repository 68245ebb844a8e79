"""The Slurm launcher: jobs, arrays, their states and their failures."""

"""The command line: verbs, composition of the config, friendly errors, what is shown."""

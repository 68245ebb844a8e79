"""The launchers, one file each: every module of this folder registers its own."""

"""The shell that starts ranks, as data: templates of the scripts in a run folder."""

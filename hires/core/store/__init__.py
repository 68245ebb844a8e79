"""The run store: the only reader and writer of run folders.

file_names    every file name, the folders of attempts, the size up to which a file is read
reading       JSON, YAML, JSON lines: raises, or collects notes; regular files only
files         atomic writes, one-write appends, locks, errors of full disks
attempts      Attempt: what the files of one attempt hold; begins attempts
records       appends events and metrics; reads config, plan and record; builds the record
ends          writes exit.json
frozen        what a run was planned from, and what was edited since
rundir        makes and opens run folders, and locates the run that a user names
campaign      campaign.json of sweeps
checkpoints   which there are, and where an attempt begins
provenance    code, versions, machine and process
"""

"""The run store: the only reader and writer of run folders.

file_names    every file name, the folders of attempts, the size up to which a file is read
reading       JSON, YAML, JSON lines: raises, or collects notes; regular files only
files         atomic writes, one-write appends, errors of full disks
attempts      Attempt: what the files of one attempt say; begins attempts
records       appends events and metrics; reads config, plan and record; builds the record
exit_record   writes exit.json and the line of the index
rundir        makes and opens run folders; find: the run that a user names
campaign      campaign.json of sweeps; run_index: index.jsonl of all results
checkpoints   which there are, and where an attempt begins; lock: one process at a time
"""

# Runs on the first node of the job: one supervisor, which starts the ranks on all nodes with srun.
# It was made by: @COMMAND@
# By hand it is a new attempt of the run: sbatch job.sbatch
tasks=(  # its run; of an array the run and the attempt of each task
@TASKS@
)
set -- "${tasks[@]:2*${SLURM_ARRAY_TASK_ID-0}:2}" "$@"
pythonpath=@PYTHONPATH@
# Exit code 66: this node does not see the run folder, which must lie where all nodes do.
cd -- "$1" && exec >>job.log 2>&1 || exit 66
unset HIRES_FAILED_SETUP
# cluster.modules and cluster.setup: the supervisor starts, too, if a line fails, and writes it down.
for hires_line in @SETUP@; do  # a name that no script of the site sets
    # A shell that is no login shell may not know the command `module` yet.
    command -v module >/dev/null || [ ! -r /etc/profile ] || . /etc/profile
    [ -n "$HIRES_FAILED_SETUP" ] || eval "$hires_line" || export HIRES_FAILED_SETUP="$hires_line"
done
# Relative paths of the config (data.path, a network of your own) count from this folder.
cd -- @FOLDER@ || exit 66
# Without empty entries: Python would import from the current folder for them.
PYTHONPATH=$(printf %s "$pythonpath:${PYTHONPATH-}" | tr -s : | sed 's/^://; s/:$//')
export PYTHONPATH
# It takes this shell's place, or Slurm's signal before the time limit would not reach it.

#!/usr/bin/env bash
# A real Slurm on this machine, for tests: munge, slurmctld and a slurmd for each node. Two nodes run
# jobs; six more are in no partition until a test makes one of them, to take nodes away from its jobs.
# usage: scripts/slurm_cluster.sh start|stop|status [--accounting] [FOLDER]
#
# Everything lies in FOLDER (else $HIRES_SLURM_DIR, else a folder below /tmp); all ports are free
# ones, so several clusters may run side by side. `start` prints the line that lets a shell use it:
#     eval "$(scripts/slurm_cluster.sh start)" && sinfo
# --accounting adds slurmdbd on a MariaDB of its own. `stop` ends what `start` began and deletes
# FOLDER.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin  # where Debian keeps daemons

usage() {
    echo "usage: scripts/slurm_cluster.sh start|stop|status [--accounting] [FOLDER]" >&2
    exit 2
}

fail() {
    echo "slurm_cluster: $*" >&2
    exit 1
}

say() {
    echo "slurm_cluster: $*" >&2
}

accounting=no
words=()
for word in "$@"; do
    case $word in
    --accounting) accounting=yes ;;
    -*) usage ;;
    *) words+=("$word") ;;
    esac
done
[ ${#words[@]} -ge 1 ] && [ ${#words[@]} -le 2 ] || usage
verb=${words[0]}
dir=${words[1]:-${HIRES_SLURM_DIR:-/tmp/hires-slurm-$(id -u)}}
case $dir in
/*) ;;
*) dir=$PWD/$dir ;;
esac
# Slurm's own files cannot quote a name.
[[ $dir =~ ^[A-Za-z0-9/._-]+$ ]] ||
    fail "the folder '$dir' may hold letters, digits and ._- only; give another one"
# The path of a socket has 107 characters at most.
[ ${#dir} -le 80 ] || fail "the path '$dir' is longer than 80 characters; give a shorter one"
export SLURM_CONF=$dir/slurm.conf
NODES="node1 node2 node3 node4 node5 node6 node7 node8"

need_root() {
    [ "$(id -u)" = 0 ] ||
        fail "Slurm's daemons must run as root to start jobs; run it as root, or with sudo"
}

# Installs Debian's packages where commands are missing.
install_packages() {
    local missing=() pair
    local wanted=(munged:munge sbatch:slurm-wlm slurmctld:slurm-wlm slurmd:slurm-wlm)
    # Debian's Open MPI starts its processes through Slurm inside a job.
    wanted+=(mpirun.openmpi:openmpi-bin)
    [ $accounting = no ] || wanted+=(slurmdbd:slurmdbd mariadbd:mariadb-server)
    for pair in "${wanted[@]}"; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
    done
    # Slurm's plug-in pmix opens libpmix.so, which is in the package for developers.
    compgen -G "/usr/lib/*/pmix2/lib/libpmix.so" >/dev/null ||
        say "srun --mpi=pmix does not work without libpmix-dev"
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null ||
        fail "missing: ${missing[*]}; this script installs them on Debian and Ubuntu only"
    say "installing ${missing[*]}"
    # An index that lacks the packages, as on a fresh machine, is fetched first.
    apt_install "${missing[@]}" || { apt-get update -q >&2 && apt_install "${missing[@]}"; } ||
        fail "apt-get could not install ${missing[*]}; the reason stands above"
}

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >&2
}

# Prints as many free ports as asked.
free_ports() {
    "${PYTHON:-python3}" - "$1" <<'PY'
import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for one in held:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in held))
PY
}

# Writes slurm.conf; every path and every port is this cluster's own.
write_conf() {
    local host ports node number=0
    host=$(hostname)
    read -ra ports <<<"$(free_ports 9)"
    cat >"$SLURM_CONF" <<CONF
ClusterName=hires
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
AuthType=auth/munge
# A job that is queued again waits for as many seconds before it starts.
AuthInfo=socket=$dir/munge/socket,cred_expire=10
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmdSpoolDir=$dir/spool/%n
StateSaveLocation=$dir/state
SlurmUser=root
SlurmdUser=root
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
JobAcctGatherType=jobacct_gather/linux
$(accounting_lines)
# Nodes may claim more cores than the machine has.
SlurmdParameters=config_overrides
# Jobs that ended stay visible to squeue and scontrol.
MinJobAge=3600
JobRequeue=1
# What can never run is refused at once.
EnforcePartLimits=ALL
KillWait=5
SchedulerParameters=batch_sched_delay=1,sched_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
$(for node in $NODES; do
        number=$((number + 1))
        echo "NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[number]} CPUs=8 RealMemory=12000"
    done)
PartitionName=debug Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=scav Nodes=node[1-2] MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
CONF
}

accounting_lines() {
    if [ $accounting = no ]; then
        echo "AccountingStorageType=accounting_storage/none"
        return
    fi
    cat <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$(cat "$dir/slurmdbd.port")
AccountingStoragePass=$dir/munge/socket
AccountingStorageEnforce=associations
CONF
}

# Starts a database and slurmdbd in front of it.
start_accounting() {
    local ports
    read -ra ports <<<"$(free_ports 2)"
    echo "${ports[1]}" >"$dir/slurmdbd.port"
    say "starting MariaDB and slurmdbd"
    mariadb-install-db --no-defaults --datadir="$dir/mysql" --user=root \
        --auth-root-authentication-method=normal --skip-test-db >"$dir/log/mariadb-install.log" 2>&1 ||
        fail "MariaDB could not make its tables: $(tail -n 3 "$dir/log/mariadb-install.log")"
    mariadbd --no-defaults --datadir="$dir/mysql" --user=root --bind-address=127.0.0.1 \
        --port="${ports[0]}" --socket="$dir/mysql.sock" --pid-file="$dir/mariadbd.pid" \
        >"$dir/log/mariadb.log" 2>&1 &
    wait_for 30 mariadb --no-defaults --socket="$dir/mysql.sock" --execute "SELECT 1" ||
        fail "MariaDB did not start: $(tail -n 3 "$dir/log/mariadb.log")"
    install -m 600 /dev/null "$dir/slurmdbd.conf"
    cat >"$dir/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=${ports[1]}
SlurmUser=root
PidFile=$dir/slurmdbd.pid
LogFile=$dir/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=${ports[0]}
StorageUser=root
StorageLoc=slurm
CONF
}

start_munge() {
    mkdir -p -m 755 "$dir/munge"
    (umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key")
    munged --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
        --pid-file="$dir/munged.pid" --seed-file="$dir/munge/seed" \
        --log-file="$dir/log/munged.log" ||
        fail "munged did not start: $(tail -n 3 "$dir/log/munged.log" 2>/dev/null)"
}

# Asks again every half second, for as many seconds as the first word says.
wait_for() {
    local tries=$(($1 * 2))
    shift
    while [ "$tries" -gt 0 ]; do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 0.5
        tries=$((tries - 1))
    done
    return 1
}

nodes_are_idle() {
    [ "$(timeout 5 scontrol show node --oneliner | grep -c 'State=IDLE ')" = "$(wc -w <<<"$NODES")" ]
}

no_jobs() {
    local queue
    queue=$(timeout 5 squeue --noheader --states=all --format=%T) || return 1
    ! grep -qE "PENDING|RUNNING|COMPLETING|CONFIGURING|SUSPENDED" <<<"$queue"
}

# Whether the process of a pid file is there and is one of this cluster: by its name, and by the
# folder in its words or, of slurmdbd, in its environment.
alive() {
    local pid
    pid=$(cat "$dir/$1.pid" 2>/dev/null) || return 1
    [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "${1%%-*}" ] || return 1
    cat "/proc/$pid/cmdline" "/proc/$pid/environ" 2>/dev/null | tr '\0' '\n' | grep -qF -- "$dir/"
}

all_alive() {
    local name
    for name in munged slurmctld ${NODES//node/slurmd-node}; do
        alive "$name" || return 1
    done
}

# Ends one daemon: SIGTERM, and SIGKILL after ten seconds.
end() {
    local pid
    alive "$1" || return 0
    pid=$(cat "$dir/$1.pid")
    kill -TERM "$pid" 2>/dev/null || return 0
    wait_for 10 not alive "$1" || kill -KILL "$pid" 2>/dev/null || true
}

not() { ! "$@"; }

start() {
    need_root
    if all_alive && nodes_are_idle; then
        say "it runs already"
        print_use
        return
    fi
    [ ! -e "$dir" ] || stop
    install_packages
    mkdir -m 755 -p "$(dirname "$dir")"
    mkdir -m 755 "$dir" || fail "cannot make the folder '$dir'"
    mkdir -p "$dir/log" "$dir/state" $(printf "$dir/spool/%s " $NODES)
    touch "$dir/.slurm_cluster"
    trap 'code=$?; [ $code = 0 ] || { say "stopping what was started"; stop; }; exit $code' EXIT
    start_munge
    [ $accounting = no ] || start_accounting
    write_conf
    start_daemons
    wait_for 60 nodes_are_idle ||
        fail "the nodes did not come up: $(tail -n 3 "$dir"/log/slurm*.log 2>/dev/null)"
    say "the nodes are up; stop them with: $0 stop${words[1]:+ $dir}"
    print_use
}

start_daemons() {
    local node
    if [ $accounting = yes ]; then
        slurmdbd # reads slurmdbd.conf beside slurm.conf
        wait_for 30 add_account ||
            fail "slurmdbd did not start: $(tail -n 3 "$dir/log/slurmdbd.log" 2>/dev/null)"
    fi
    slurmctld -i -f "$SLURM_CONF" || fail "slurmctld did not start; read the lines above"
    for node in $NODES; do
        slurmd -N "$node" -f "$SLURM_CONF" || fail "slurmd of $node did not start"
    done
}

# With accounting only known accounts may run jobs; this one is everybody's.
add_account() {
    timeout 5 sacctmgr -i add cluster hires || true
    timeout 5 sacctmgr -i add account hires Cluster=hires || true
    timeout 5 sacctmgr -i add user root Account=hires Cluster=hires || true
    timeout 5 sacctmgr -nP show associations format=Account,User | grep -qF "hires|root"
}

print_use() {
    echo "export SLURM_CONF=$SLURM_CONF"
}

stop() {
    need_root
    [ -e "$dir" ] || {
        say "nothing runs in $dir"
        return 0
    }
    [ -e "$dir/.slurm_cluster" ] ||
        fail "'$dir' was not made by this script, so nothing in it is stopped or deleted"
    if alive slurmctld && alive slurmd-node1 && command -v scancel >/dev/null; then
        # Jobs end before the daemons that watch them; those that ignore SIGTERM after KillWait.
        timeout 10 scancel --user=root --quiet || true
        wait_for 30 no_jobs || say "some jobs did not end in time"
    fi
    local name
    for name in ${NODES//node/slurmd-node} slurmctld slurmdbd mariadbd munged; do
        end "$name"
    done
    rm -rf -- "$dir"
    say "stopped"
}

status() {
    local name
    all_alive || {
        say "nothing runs in $dir; start it with: $0 start"
        exit 3
    }
    for name in munged slurmdbd mariadbd slurmctld ${NODES//node/slurmd-node}; do
        ! alive "$name" || say "$name runs as process $(cat "$dir/$name.pid")"
    done
    timeout 10 sinfo >&2
    print_use
}

case $verb in
start | stop | status) "$verb" ;;
*) usage ;;
esac

# shellcheck shell=bash
# `. environment.sh && ray start … $here`: a node as training wants it. What the machine has set already stays.
# `… && follow` on all but the head.

export PATH="$HOME/.raydist/env/bin:$PATH"
# `ray up` sets both in the shell that runs this; the first would hold for all that trains on the CPU.
unset OMP_NUM_THREADS PYTHONWARNINGS

# Nobody without ~/.ray/auth_token may talk to the cluster, and nobody else may read it.
export RAY_AUTH_MODE=token
chmod 600 ~/.ray/auth_token
# A node that falls silent is given up after 20 s; Ray's own values make that 65. Read by the head.
export RAY_health_check_initial_delay_ms="${RAY_health_check_initial_delay_ms:-5000}"
export RAY_health_check_period_ms="${RAY_health_check_period_ms:-1000}"
export RAY_health_check_timeout_ms="${RAY_health_check_timeout_ms:-4000}"
export RAY_health_check_failure_threshold="${RAY_health_check_failure_threshold:-4}"
# `ray job stop` kills after 3 s otherwise, before a large state is on the disk. Seconds.
export RAY_JOB_STOP_WAIT_TIME_S="${RAY_JOB_STOP_WAIT_TIME_S:-300}"
# Ray runs its workers at nice 15, below all else on the machine.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi 2>/dev/null
}

# limit LETTER NAME VALUE: a limit as high as may be. InfiniBand needs locked memory, Ray needs many open files.
limit() {
    ulimit "-$1" "$3" 2>/dev/null || as_root prlimit --pid $$ "--$2=$3:$3" || {
        ulimit "-S$1" "$(ulimit "-H$1")"
        echo "raydist: $2 stays at $(ulimit "-H$1") on $(hostname): as root, put '* - $2 $3' into /etc/security/limits.conf" >&2
    }
}
limit l memlock unlimited
limit n nofile 1048576

# Ray's objects, the snapshots and NCCL's buffers lie in /dev/shm. kB of it, and of the memory.
shm=$(df --output=size /dev/shm | tail -1)
memory=$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)
if [ "$shm" -lt $((memory * 2 / 5)) ]; then
    as_root mount -o remount,size=50% /dev/shm ||
        echo "raydist: /dev/shm has $((shm >> 20)) GiB on $(hostname): as root, mount -o remount,size=50% /dev/shm" >&2
fi

# Ray's helpers outlive a raylet that has lost its head: without this `ray down` would leave them on all other nodes.
follow() {
    # shellcheck disable=SC2016 # the inner shell fills them in
    setsid sh -c 'echo $$ >~/.raydist/follows; tail --pid="$0" -f /dev/null; ray stop --force' \
        "$(pgrep -n -u "$(id -u)" -x raylet)" </dev/null >/dev/null 2>&1 &
}
# That of the Ray before this one has nothing to stop any more.
[ ! -f ~/.raydist/follows ] || kill -- "-$(cat ~/.raydist/follows)" 2>/dev/null
rm -f ~/.raydist/follows

# The address at which ssh found this node is the one that the cluster's file knows it by; a name may lead to 127.0.1.1.
address=$(echo "${SSH_CONNECTION:-}" | cut -d' ' -f3)
# shellcheck disable=SC2034 # for `ray start`
here="--disable-usage-stats ${address:+--node-ip-address=$address}"

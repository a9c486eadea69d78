# shellcheck shell=bash
# `. environment.sh && ray start … $here`: the limits and variables of a training node. It keeps values that the machine has set.
# `… && follow` on all nodes except the head.

export PATH="$HOME/.raydist/env/bin:$PATH"
# `ray up` sets both in the shell that runs this; the first would limit all training on the CPU.
unset OMP_NUM_THREADS PYTHONWARNINGS

# Only clients that have ~/.ray/auth_token can use the cluster; only its owner can read that file.
export RAY_AUTH_MODE=token
chmod 600 ~/.ray/auth_token
# Ray gives its own folders mode 0777, also those with the code of jobs: put them into one that no other user can enter.
export RAY_TMPDIR="${RAY_TMPDIR:-/tmp/ray-$(id -u)}"
mkdir -m 700 "$RAY_TMPDIR" 2>/dev/null
if [ -L "$RAY_TMPDIR" ] || [ ! -O "$RAY_TMPDIR" ] || [ $((0$(stat -c %a "$RAY_TMPDIR") & 077)) != 0 ]; then
    echo "raydist: RAY_TMPDIR=$RAY_TMPDIR on $(hostname) must be a folder of uid $(id -u) alone: chmod 700 it, or, if it is not yours, \
set RAY_TMPDIR to another one in ~/.profile" >&2
    return 1
fi
# Ray declares a silent node dead after 20 s; with its default values after 65 s. The head reads these.
export RAY_health_check_initial_delay_ms="${RAY_health_check_initial_delay_ms:-5000}"
export RAY_health_check_period_ms="${RAY_health_check_period_ms:-1000}"
export RAY_health_check_timeout_ms="${RAY_health_check_timeout_ms:-4000}"
export RAY_health_check_failure_threshold="${RAY_health_check_failure_threshold:-4}"
# Seconds that `ray job stop` waits before it kills: the default of 3 is too short to write a large state to the disk.
export RAY_JOB_STOP_WAIT_TIME_S="${RAY_JOB_STOP_WAIT_TIME_S:-300}"
# Nodes may have Python 3.11.2 and 3.11.9, but not 3.11 and 3.12: Ray compares the last part too.
export RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL="${RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL:-minor}"
# Ray runs its workers at nice 15, below everything else on the machine.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi 2>/dev/null
}

# limit LETTER NAME VALUE: raise a limit as far as possible. InfiniBand needs locked memory, Ray needs many open files.
limit() {
    ulimit "-$1" "$3" 2>/dev/null || as_root prlimit --pid $$ "--$2=$3:$3" || {
        ulimit "-S$1" "$(ulimit "-H$1")"
        echo "raydist: $2 stays at $(ulimit "-H$1") on $(hostname): as root, put '* - $2 $3' into /etc/security/limits.conf" >&2
    }
}
limit l memlock unlimited
limit n nofile 1048576

# /dev/shm holds Ray's objects, the snapshots and NCCL's buffers. Its size and the memory, in kB.
shm=$(df --output=size /dev/shm | tail -1)
memory=$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)
if [ "$shm" -lt $((memory * 2 / 5)) ]; then
    as_root mount -o remount,size=50% /dev/shm ||
        echo "raydist: /dev/shm has $((shm >> 20)) GiB on $(hostname): as root, mount -o remount,size=50% /dev/shm" >&2
fi

# A process: its pid, the boot, its start time. After a reboot another process may have the pid.
process() {
    echo "$1 $(cat /proc/sys/kernel/random/boot_id) $(sed 's/.*)//' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f21)"
}
# One for each node and boot: nodes may share the home.
note=~/.raydist/follows-$(cat /proc/sys/kernel/random/boot_id)
# Ray's helper processes outlive a raylet that has lost its head. Without this, `ray down` leaves them on the other nodes.
follow() {
    # shellcheck disable=SC2016 # the inner shell fills them in
    setsid bash -c "$(declare -f process)"'
        process $$ >"$1"; tail --pid="$0" -f /dev/null; ray stop --force' \
        "$(pgrep -n -u "$(id -u)" -x raylet)" "$note" </dev/null >/dev/null 2>&1 &
}
# The `follow` of an earlier Ray is no longer needed. That of an earlier raydist is noted in `follows`, maybe by another node.
for earlier in "$note" ~/.raydist/follows; do
    if follower=$(cut -d' ' -f1 "$earlier" 2>/dev/null) && [ "$(process "$follower")" = "$(cat "$earlier")" ]; then
        kill -- "-$follower" 2>/dev/null
        rm -f "$earlier"
    fi
done
rm -f "$note"

# ssh reached this node at the address in the cluster's file; the host name may resolve to 127.0.1.1.
address=$(echo "${SSH_CONNECTION:-}" | cut -d' ' -f3)
# But `ray up` reaches the head at external_head_ip, the other nodes at head_ip. Ray writes the cluster's file to the head, as JSON,
# before it starts Ray there; the other nodes, which may share the home, have RAY_HEAD_IP.
if [ -z "${RAY_HEAD_IP:-}" ] && grep -q '"external_head_ip": "' ~/ray_bootstrap_config.yaml 2>/dev/null; then
    inner=$(getent ahosts "$(sed -n 's/.*"head_ip": "\([^"]*\)".*/\1/p' ~/ray_bootstrap_config.yaml)" | sed 's/ .*//;q')
    case " $(hostname -I) " in *" ${inner:-none} "*) address=$inner ;; esac
fi
# shellcheck disable=SC2034 # for `ray start`
here="--disable-usage-stats --temp-dir=$RAY_TMPDIR/ray ${address:+--node-ip-address=$address}"

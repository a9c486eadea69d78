#!/usr/bin/env bash
# setup.sh [PACKAGE…]: creates ~/.raydist/env on a node, a Python environment with the raydist of ~/.raydist/src and these packages.
# PYTHON=python3.12 before it uses that Python instead of python3. RAY=2.60.0 and TORCH=2.15.0 before it choose the head's
# versions; without them it gets the newest that raydist admits.
set -euo pipefail

env=$HOME/.raydist/env
python=${PYTHON:-python3}
# The head writes its versions into a folder of file_mounts, which Ray copies from the head to all nodes that join, now or later.
# On those nodes Ray sets RAY_HEAD_IP.
node=$HOME/.raydist/src/deploy/node
versions=$node/versions.txt

version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

# missing PACKAGE VERSION: says so if pip has no such version for this Python.
missing() {
    local name=$1 wanted=$2 found newest
    [ -n "$wanted" ] || return 0
    found=$("$env/bin/python" -m pip index versions "$name" 2>/dev/null | sed -n "s/^$name (\(.*\))$/\1/p; s/^Available versions: //p")
    [ -n "$found" ] || return 0
    newest=$(head -n 1 <<<"$found")
    case ", $(tail -n 1 <<<"$found")," in
        *", $wanted,"* | *", $wanted+"*) ;;
        *) echo "raydist: $(hostname) has Python $has, for which pip finds no $name $wanted; the newest is $newest:" \
            "in setup_commands put ${name^^}=$newest, or PYTHON=python3.12 if all nodes have that" >&2 ;;
    esac
}
has=$(version "$python")
follows=no
if [ -n "${RAY_HEAD_IP:-}" ] && [ -f "$versions" ]; then
    follows=yes
    wanted=$(sed -n 's/^# Python //p' "$versions")
    if [ "$has" != "$wanted" ]; then # Ray would refuse the node
        echo "raydist: $(hostname) has Python $has and the head Python $wanted, but all nodes need the same:" \
            "install Python $wanted there, or choose one that all have: in setup_commands put PYTHON=python$wanted before bash" >&2
        exit 1
    fi
fi

# Nodes may share the home, and are set up at the same time.
exec 9>"$HOME/.raydist/lock"
flock 9 || # as on Lustre that is mounted without -o flock
    echo "raydist: $HOME on $(hostname) has no locks: if nodes share it, set them up one after another" >&2

# A torch that is part of the machine's image, built for its driver, is used; otherwise pip fetches one.
if [ ! -x "$env/bin/python" ] || [ "$(version "$env/bin/python")" != "$has" ]; then
    "$python" -m venv --clear --system-site-packages "$env" || {
        rm -rf "$env"
        echo "raydist: $(hostname) can't make a Python environment: sudo apt-get install -y python3-venv" >&2
        exit 1
    }
fi

chosen=$versions
if [ "$follows" = no ]; then
    chosen=$env/chosen.txt
    printf '%s\n' ${RAY:+"ray==$RAY"} ${TORCH:+"torch==$TORCH"} >"$chosen"
fi
"$env/bin/python" "$node/versions.py" read "$chosen" >"$env/constraints.txt"
"$env/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$env/constraints.txt" \
    "$HOME/.raydist/src" "$@" || {
    if [ "$follows" = no ]; then # A new release often has no package for the oldest Python.
        missing ray "${RAY:-}"
        missing torch "${TORCH:-}"
    fi
    exit 1
}
if [ -z "${RAY_HEAD_IP:-}" ]; then
    "$env/bin/python" "$node/versions.py" write "$versions"
fi

# The `ray` of an image belongs to another Python, which does not know this environment.
if [ ! -x "$env/bin/ray" ]; then
    printf '#!%s\nfrom ray.scripts.scripts import main\nmain()\n' "$env/bin/python" >"$env/bin/ray"
    chmod +x "$env/bin/ray"
fi

# `ray down` and `ray exec` type `ray` into a login shell. A driver that is started there is checked as a node is.
# shellcheck disable=SC2016 # the shell that reads it fills them in
line='export PATH="$HOME/.raydist/env/bin:$PATH" RAY_AUTH_MODE=token RAY_TMPDIR="${RAY_TMPDIR:-/tmp/ray-$(id -u)}"'\
' RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL="${RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL:-minor}"'
grep -qsxF "$line" ~/.bashrc || echo "$line" >>~/.bashrc

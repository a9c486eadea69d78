#!/usr/bin/env bash
# setup.sh [PACKAGE…]: makes ~/.raydist/env on a node: a Python environment with the raydist of ~/.raydist/src, and these packages.
set -euo pipefail

env=$HOME/.raydist/env
# A torch that the machine's image brings, built for its driver, is used; without one it is fetched.
[ -x "$env/bin/python" ] || python3 -m venv --system-site-packages "$env" || {
    rm -rf "$env"
    echo "raydist: $(hostname) can't make a Python environment: sudo apt-get install -y python3-venv" >&2
    exit 1
}
"$env/bin/python" -m pip install --quiet --disable-pip-version-check "$HOME/.raydist/src" "$@"

# The command of a Ray that the image brings belongs to another Python, which knows nothing of this environment.
if [ ! -x "$env/bin/ray" ]; then
    printf '#!%s\nfrom ray.scripts.scripts import main\nmain()\n' "$env/bin/python" >"$env/bin/ray"
    chmod +x "$env/bin/ray"
fi

# `ray down` and `ray exec` type `ray` into a login shell.
# shellcheck disable=SC2016 # the shell that reads it fills them in
grep -qs '/.raydist/env/bin' ~/.bashrc || echo 'export PATH="$HOME/.raydist/env/bin:$PATH" RAY_AUTH_MODE=token' >>~/.bashrc

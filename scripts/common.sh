# Shared by the scripts beside it: where the repository is, which environment to use, how to say what is wrong.
# Sourced, never run.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd -- "$root"

say() { printf '%s\n' "$*" >&2; }

# die CODE MESSAGE: one sentence on stderr, then the end.
die() {
    local code=$1
    shift
    say "$(basename -- "$0"): $*"
    exit "$code"
}

# The comment block below a script's first line is its help.
print_help() { sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"; }

# take_options ARGS...: picks out --help, --torch VERSION and --apt (common to all scripts) and leaves the rest in `rest`.
torch_version=
install_options=()
rest=()
take_options() {
    while (($#)); do
        case $1 in
            -h | --help)
                print_help
                exit 0
                ;;
            --torch)
                (($# >= 2)) || die 2 "--torch needs a version, as in: --torch 2.11"
                torch_version=$2
                shift
                ;;
            --torch=*) torch_version=${1#--torch=} ;;
            --apt) install_options+=(--apt) ;;
            --)
                shift
                rest+=("$@")
                break
                ;;
            *) rest+=("$1") ;;
        esac
        shift
    done
    if [[ -n $torch_version ]]; then
        [[ $torch_version =~ ^[0-9]+\.[0-9]+$ ]] || die 2 "--torch takes a version such as 2.11, not '$torch_version'"
        install_options+=(--torch "$torch_version")
    fi
}

# The environment's folder: one per torch version asked for; else the active one; else .venv.
environment() {
    if [[ -n $torch_version ]]; then
        printf '%s' "$root/.venv-torch$torch_version"
    else
        printf '%s' "${VIRTUAL_ENV:-$root/.venv}"
    fi
}

# install_and_activate: after it `python` is the environment's.
install_and_activate() {
    "$root/scripts/install" "${install_options[@]}"
    VIRTUAL_ENV=$(environment)
    export VIRTUAL_ENV
    export PATH="$VIRTUAL_ENV/bin:$PATH"
    unset PYTHONHOME
}

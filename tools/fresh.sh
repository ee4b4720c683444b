#!/usr/bin/env bash
# Runs a command in this checkout as on a machine where nothing ever ran: with an empty HOME and an
# empty TMPDIR and, as root on Linux, an empty /tmp. Fails if the command fails, or leaves anything
# in them but pip's own cache, and what rustup writes when pip asks rustc for its version.
#   tools/fresh.sh COMMAND...
set -u
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [ "${1:-}" != --inside ]; then
    [ $# -gt 0 ] || { echo "usage: tools/fresh.sh COMMAND..." >&2; exit 2; }
    place=$(mktemp -d "${FRESH_PLACE:-/var/tmp}/fresh.XXXXXX") || exit 2
    mkdir "$place/home" "$place/tmp" "$place/checkout"
    apart=()
    if [ "$(uname)" = Linux ] && [ "$(id -u)" = 0 ] && unshare --mount true 2>/dev/null; then
        apart=(unshare --mount --propagation private)
    else
        echo "fresh: only root on Linux gets an empty /tmp; HOME and TMPDIR are empty" >&2
    fi
    env -u XDG_CACHE_HOME -u XDG_CONFIG_HOME HOME="$place/home" TMPDIR="$place/tmp" \
        "${apart[@]}" bash "${BASH_SOURCE[0]}" --inside "$place" "${#apart[@]}" "$@"
    status=$?
    rm -rf "$place"
    exit $status
fi

shift
place=$1 is_apart=$2
shift 2
if [ "$is_apart" != 0 ]; then
    unset TMPDIR
    mount --bind "$checkout" "$place/checkout" # stays visible where the checkout lies below /tmp
    mount -t tmpfs -o mode=1777 tmpfs /tmp
    mkdir -p "$checkout"
    mountpoint --quiet "$checkout" || mount --bind "$place/checkout" "$checkout"
    mount --bind /tmp "$place/tmp"
fi
cd "$checkout" && "$@"
status=$?
left=$( # files, and folders with nothing in them
    find "$place/home" -mindepth 1 \( -path "$place/home/.cache/pip" -o -path "$place/home/.rustup" \) -prune -o \
        -mindepth 1 \( ! -type d -o -empty \) -print | sed "s|^$place/home|~|"
    find "$place/tmp" -mindepth 1 -path "$place/tmp${checkout#/tmp}" -prune -o \
        -mindepth 1 \( ! -type d -o -empty \) -print | sed "s|^$place||"
)
if [ -n "$left" ]; then
    echo "fresh: $(wc -l <<<"$left") files were left behind:" >&2
    head -n 40 <<<"$left" >&2
    [ $status != 0 ] || status=1
fi
exit $status

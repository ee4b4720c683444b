#!/usr/bin/env bash
# The image of deploy/Containerfile where there is no registry: Debian's packages and this environment's vLLM in place of
# vLLM's image, the examples as the plugin package. As root, with mmdebstrap and buildah, `python3` the environment's:
#
#   deploy/build-without-registry.sh TAG [MIRROR and options of mmdebstrap]
#
# The environment's Python has to be of the version that this release of Debian has.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=$1
shift
base=localhost/vllm-from-packages
work=$(mktemp -d)
container=$(buildah from scratch)
trap 'buildah rm "$container" > /dev/null; rm -rf "$work"' EXIT
root=$(buildah mount "$container")

suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
mmdebstrap --variant=minbase --include=python3,python3-pip,libnuma1 "$suite" "$work/base.tar" "$@"
tar -xf "$work/base.tar" -C "$root" --numeric-owner
rm -rf "$root"/etc/apt/sources.list* "$root"/etc/apt/apt.conf.d/99mmdebstrap  # this machine's package index

# Without what is installed editable from this checkout, and without pip, which is Debian's.
version=$(python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
tar -C "$packages" --exclude='./_vllm_mmkit*' --exclude='./vllm_mmkit*' --exclude='./pip' --exclude='./pip-*' \
    -cf - . | tar -xf - -C "$root/usr/local/lib/$version/dist-packages" --no-same-owner
buildah commit -q "$container" "$base"

python3 -m pip wheel -q --no-deps --wheel-dir "$work/wheels" . ./examples
buildah bud --format docker --pull-never -f deploy/Containerfile --build-arg BASE_IMAGE="$base" -t "$tag" "$work/wheels"

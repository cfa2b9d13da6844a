#!/bin/sh
# Makes leaf_sha256.ptx from leaf_sha256.cu: leaf_sha256.sh [OUT]
#
# nvcc 13 writes `.version 9.0`, which only drivers of the 580 series and later
# take, though the kernel uses nothing newer than PTX 6.3. The version line is
# lowered to it, so that the driver of any CUDA from 10.0 on compiles it, for
# any GPU from compute capability 7.5 on.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/leaf_sha256.ptx}
raw=$(mktemp)
trap 'rm -f "$raw"' EXIT
${NVCC:-nvcc} -ptx -O3 -arch=compute_75 -o "$raw" "$here/leaf_sha256.cu"
sed -e 's/^\.version .*/.version 6.3/' "$raw" >"$out"

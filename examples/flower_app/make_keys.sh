#!/bin/sh
# A key pair for every node.
#   ./make_keys.sh [FOLDER] [NODES]
# FOLDER defaults to keys, NODES to 5. nodeN goes to that node alone, nodeN.pub is registered with the SuperLink.
set -eu
folder=${1:-keys}
nodes=${2:-5}
umask 077
mkdir -p "$folder"
number=0
while [ "$number" -lt "$nodes" ]; do
  [ -e "$folder/node$number" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "node$number" -f "$folder/node$number"
  number=$((number + 1))
done
echo "$folder: node0 ... node$((nodes - 1)), and their public keys in .pub"

#!/bin/sh
# A certificate authority and a server certificate for a SuperLink.
#   ./make_certificates.sh [FOLDER] [NAME...]
# FOLDER defaults to certificates; NAMEs are the host names and addresses under which nodes reach the SuperLink.
# localhost and 127.0.0.1 are added, for the processes on the server. ca.crt goes to every node; ca.key and server.key
# stay where they are.
set -eu
folder=${1:-certificates}
[ $# -gt 0 ] && shift
set -- "$@" localhost 127.0.0.1
names=
for name in "$@"; do
  case $name in *[!0-9.]*) kind=DNS ;; *) kind=IP ;; esac
  names=${names:+$names,}$kind:$name
done
umask 077
mkdir -p "$folder"
cd "$folder"
[ ! -e server.key ] || { echo "$folder holds certificates already; remove it or name another folder" >&2; exit 2; }
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 365 -sha384 \
  -subj "/CN=fedgma example authority" -addext "basicConstraints=critical,CA:TRUE" \
  -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout ca.key -out ca.crt 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -subj "/CN=$1" \
  -keyout server.key -out server.csr 2>/dev/null
printf 'subjectAltName=%s\nbasicConstraints=CA:FALSE\nkeyUsage=digitalSignature\nextendedKeyUsage=serverAuth\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n' "$names" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -sha384 \
  -extfile server.ext -out server.pem 2>/dev/null
rm -f server.csr server.ext ca.srl
chmod 644 ca.crt server.pem
echo "$folder: ca.crt (for every node), server.pem and server.key (SuperLink), ca.key (keep it away) for $names"

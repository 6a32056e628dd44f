#!/bin/sh
# Ray's encryption. `ray-tls.sh ca` makes the cluster's authority in $RAY_CA_FOLDER, unless it is there. `ray-tls.sh run
# COMMAND...` runs a command of Ray, or a flow, with a certificate of its own for this machine's addresses: Ray checks the
# address that it connects to. Certificates are valid for as long as the authority is, ten years.
set -eu
folder=${RAY_CA_FOLDER:?folder of the authority, ca.crt and ca.key}
days=3650
umask 077

case ${1:-} in
ca)
  if [ ! -s "$folder/ca.key" ]; then
    openssl req -x509 -newkey rsa:3072 -nodes -days "$days" -subj "/CN=grpo ray authority" \
      -keyout "$folder/new.key" -out "$folder/ca.crt" 2>/dev/null
    mv "$folder/new.key" "$folder/ca.key"
  fi
  ;;
run)
  shift
  own=$(mktemp -d)
  names="DNS:localhost,IP:127.0.0.1,DNS:$(hostname)"
  for address in $(hostname -I); do names="$names,IP:$address"; done
  for name in ${RAY_TLS_NAMES:-}; do names="$names,DNS:$name"; done
  echo "subjectAltName=$names" >"$own/names"
  openssl req -newkey rsa:3072 -nodes -subj "/CN=$(hostname)" -keyout "$own/node.key" -out "$own/node.csr" 2>/dev/null
  openssl x509 -req -in "$own/node.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -days "$days" \
    -set_serial "0x$(openssl rand -hex 16)" -extfile "$own/names" -out "$own/node.crt" 2>/dev/null
  RAY_USE_TLS=1 RAY_TLS_CA_CERT="$folder/ca.crt" RAY_TLS_SERVER_CERT="$own/node.crt" RAY_TLS_SERVER_KEY="$own/node.key"
  export RAY_USE_TLS RAY_TLS_CA_CERT RAY_TLS_SERVER_CERT RAY_TLS_SERVER_KEY
  exec "$@"
  ;;
*)
  echo "usage: ray-tls.sh ca | ray-tls.sh run COMMAND..." >&2
  exit 2
  ;;
esac

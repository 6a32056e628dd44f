#!/bin/sh
# make-env.sh FILE: writes FILE from compose/.env.example with a random word for each CHANGE_ME. Never over one that is
# there: a new password would not fit databases that were made with the old one.
set -eu
file=${1:?file to write}
if [ -e "$file" ]; then
  echo "$file is there; its secrets stay as they are" >&2
  exit 1
fi
umask 077
while IFS= read -r line; do
  case $line in
  '#'*) ;;
  *CHANGE_ME) line=${line%CHANGE_ME}$(openssl rand -hex 24) ;;
  esac
  printf '%s\n' "$line"
done <"$(dirname "$0")/../compose/.env.example" >"$file"

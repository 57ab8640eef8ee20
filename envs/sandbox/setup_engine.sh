#!/usr/bin/env bash
# Brings up what the Docker sandbox needs: an engine that answers and the local base image `burnish-base:1`.
#
# Safe to repeat: each part is skipped when it is already there. Where it cannot be done (not root, no apt, no rights to
# run a daemon) it says so in one line and exits 0: `sandbox=auto` then falls back to the local subprocess sandbox.
set -u -o pipefail

IMAGE=burnish-base:1
LOG=/var/log/burnish-dockerd.log
# bash, coreutils, grep, sed, findutils and tar are in minbase; ca-certificates so that a task can be given a network
PACKAGES=python3,git,gawk,procps,ca-certificates

say() { echo "setup: $*"; }
give_up() { say "$* Docker sandboxes are not available; sandbox=auto will use the local one."; exit 0; }
answers() { timeout 20 docker version >/dev/null 2>&1; }

install_packages() { # package...
  say "installing $* from apt"
  apt-get update -qq >/dev/null || return 1
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null 2>&1
}

start_engine() {
  if [ -d /run/systemd/system ]; then
    systemctl start docker >/dev/null 2>&1
  else
    # a killed daemon leaves its pid file, and refuses to start while another process (or its own zombie) has that number
    local pidfile pid daemon
    for pidfile in /var/run/docker.pid /var/run/docker/containerd/containerd.pid; do
      pid=$(cat "$pidfile" 2>/dev/null) || continue
      grep -q -E "^$pid \((dockerd|containerd)\) [^Z]" "/proc/$pid/stat" 2>/dev/null || rm -f "$pidfile"
    done
    say "starting dockerd, log in $LOG"
    # episodes run without a network, so the engine needs neither a bridge nor firewall rules
    setsid dockerd --iptables=false --bridge=none >>"$LOG" 2>&1 </dev/null 9>&- &
    daemon=$!
  fi
  for _ in $(seq 150); do
    answers && return 0
    [ -z "${daemon:-}" ] || kill -0 "$daemon" 2>/dev/null || return 1
    sleep 0.2
  done
  return 1
}

make_image() {
  local suite mirror root
  suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  # the machine's own mirror, whichever file and format names it
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $suite" 'Component: main' | head -1)
  [ -n "$mirror" ] || { say "no apt mirror found for suite '$suite'"; return 1; }
  root=$(mktemp -d /var/tmp/burnish-base.XXXXXX) || return 1
  say "building $IMAGE ($suite, about a minute)"
  if debootstrap --variant=minbase --include="$PACKAGES" "$suite" "$root" "$mirror" >"$root.log" 2>&1; then
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
      "$root"/usr/share/{doc,man,info,locale,lintian,bash-completion}/*
    mkdir -p "$root"/app "$root"/logs/verifier "$root"/logs/artifacts
    tar -C "$root" --numeric-owner -c . | docker import --change 'CMD ["bash"]' --change 'ENV LANG=C.UTF-8' \
      --change 'LABEL burnish.base=1' - "$IMAGE" >/dev/null
    local rc=$?
  else
    say "debootstrap failed:"; tail -5 "$root.log"
    local rc=1
  fi
  # a failed bootstrap can leave /proc and /sys mounted inside; rm must not walk into them
  for mounted in $(awk -v root="$root/" 'index($2, root) == 1 {print $2}' /proc/mounts | sort -r); do umount "$mounted"; done
  rm -rf --one-file-system "$root" "$root.log"
  return $rc
}

# two set-ups at once would build the image twice
exec 9>/tmp/burnish-setup-engine.lock
flock 9

if ! answers; then
  [ "$(id -u)" = 0 ] || give_up "no Docker engine answers and this is not root."
  if ! command -v dockerd >/dev/null; then
    command -v apt-get >/dev/null || give_up "no Docker engine and no apt to install it with."
    install_packages docker.io busybox-static debootstrap || give_up "apt could not install docker.io."
  fi
  if ! start_engine; then
    tail -5 "$LOG" 2>/dev/null
    give_up "the Docker engine did not start."
  fi
fi
say "Docker engine $(docker version --format '{{.Server.Version}}') answers"

if ! docker image inspect "$IMAGE" >/dev/null 2>&1; then
  [ "$(id -u)" = 0 ] || give_up "the base image $IMAGE is missing and only root can make it."
  command -v apt-get >/dev/null || give_up "the base image $IMAGE is missing and there is no apt to make it with."
  command -v debootstrap >/dev/null || install_packages debootstrap || give_up "apt could not install debootstrap."
  make_image || give_up "the base image $IMAGE could not be made."
fi
say "base image $IMAGE is $(docker image inspect --format '{{.Size}}' "$IMAGE" | awk '{printf "%.0f MB", $1 / 1e6}')"

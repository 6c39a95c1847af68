#!/bin/sh
# Docker's health check (Kubernetes has probes of its own): what answers is asked, what only computes lives as long as it runs.
# CLICKLINE_METRICS_PORT: serve.metrics_port, where it is not the usual one.
ask() { wget -q -T 3 -t 1 --no-check-certificate -O- "$1"; }

role=" $(tr '\0' ' ' </proc/1/cmdline) "
case $role in
*" serve "* | *" lookup "*)
    admin=localhost:${CLICKLINE_METRICS_PORT:-8502}/healthz
    ask "http://$admin" || ask "https://$admin"
    ;;
*"ray start"*) ask http://localhost:52365/api/local_raylet_healthz | grep -q success ;;
esac

# Ends when the system's start has ended: 0 for running or degraded, else 1 with the reason. Input: limit, in seconds.
end=$(($(date +%s) + limit))
# Until systemd listens there is nothing to wait on; that is a matter of tenths of a second after the container's start.
until [ -S /run/systemd/private ]; do
  if [ "$(date +%s)" -ge "$end" ]; then
    echo "container_ready_timeout is $limit: no systemd within that time; process 1 is $(cat /proc/1/comm)" >&2
    exit 1
  fi
  sleep 0.05
done
state=$(timeout "$limit" systemctl is-system-running --wait)
case $state in
running) echo running ;;
degraded)
  echo "degraded, these units failed:"
  systemctl --failed --no-legend --plain
  ;;
*)
  echo "container_ready_timeout is $limit: the system is '${state:-still starting}' after that; jobs still queued:" >&2
  systemctl list-jobs --no-legend >&2
  exit 1
  ;;
esac

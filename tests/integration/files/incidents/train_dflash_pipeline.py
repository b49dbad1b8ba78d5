"""Stands for the training of incidents A and C: real steps, a real log, no model."""

import itertools
import os
import time

print(f"ev=start pid={os.getpid()} profile_interval={os.environ.get('DFLASH_PROFILE_INTERVAL', '-')}", flush=True)
for step in itertools.count(1):
    print(f"ev=step step={step} loss={9 / step:.3f}", flush=True)
    time.sleep(0.2)

"""Stands for the monitor of incident B."""

import itertools
import time

for step in itertools.count(1):
    print(f"ev=step step={step} scanned", flush=True)
    time.sleep(0.2)

"""A small job: one step line every 0.2 s; says which code and settings it runs, never its secret."""

import itertools
import os
import time

print(
    f"ev=start level={os.environ['LEVEL']} secret={'set' if os.environ.get('SEEDED_SECRET') else 'absent'}", flush=True
)
for step in itertools.count(1):
    print(f"ev=step step={step}", flush=True)
    time.sleep(0.2)

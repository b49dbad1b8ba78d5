# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stop and remove every container of the node, without the API: it may be what is broken.

Run as `python3 -m launchproof_node.destroy STATE_DIR`.
"""

import asyncio
import sys

from .runtime import Runtime
from .settings import Settings
from .state import Store


async def destroy(settings):
    """Stop and remove them; raises runtime.Failed."""
    runtime, store = Runtime(settings), Store(settings)
    for vmid in store.load():
        if runtime.is_running(vmid):
            await runtime.stop(vmid)
        runtime.discard(vmid)
        store.remove(vmid)


if __name__ == "__main__":
    asyncio.run(destroy(Settings(sys.argv[1])))

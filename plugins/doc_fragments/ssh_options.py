# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import re
import textwrap

from ansible.plugins.connection import ssh


def _options() -> str:
    """The options of ansible.builtin.ssh as this ansible-core declares them.

    A connection that inherits from it reads all of them, and which there are differs from version to version; a copy
    would break with the next one. Cut out as text, since this runs for every task and parsing YAML to write it again
    would take a tenth of that. Their version_added speaks of ansible-core, not of this collection.
    """
    text = textwrap.dedent(ssh.DOCUMENTATION)
    options = re.search(r"^options:\n(?:(?: .*)?\n)+", text + "\n", re.MULTILINE).group()
    return re.sub(r"^ +version_added:.*\n", "", options, flags=re.MULTILINE)


class ModuleDocFragment:
    """Options of ansible.builtin.ssh, for a connection plugin that inherits from it."""

    # Annotated, since ansible-test takes a plain assignment for YAML text.
    DOCUMENTATION: str = _options()

# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations


class ModuleDocFragment:
    """What the Proxmox modules share: how the API is reached, and the declaration of a container."""

    # Connection
    DOCUMENTATION = r"""
options:
  api_host:
    description: Name or address of the node whose API is asked. Role variable C(pve_api_host).
    type: str
    required: true
  api_port:
    description: Port of the API. Role variable C(pve_api_port).
    type: int
    default: 8006
  api_via:
    description: Who the API is asked as. Role variable C(pve_api_via).
    type: str
    default: https
    choices:
      https: O(api_user), by token or password.
      node: The node itself, C(root@pam), by C(pvesh) on it as O(root_via) says. No token, no password and no rights
        are needed, and each call takes a second or two.
  api_user:
    description: User with its realm, such as V(deploy@pve). Needed with O(api_via=https). Role variable
      C(pve_api_user).
    type: str
  api_token_id:
    description:
      - Name of the API token of O(api_user), V(launchproof) or V(deploy@pve!launchproof). Role variable
        C(pve_api_token_id).
    type: str
  api_token_secret:
    description: Secret of O(api_token_id). Role variable C(pve_api_token_secret).
    type: str
  api_password:
    description:
      - Password of O(api_user) for a ticket, instead of a token. Role variable C(pve_api_password).
      - V(root@pam) with its password is the one API identity that may set root-only keys, see O(root_via).
    type: str
  api_ca_path:
    description:
      - File with the certificate that signed the API's, on the controller. Role variable C(pve_api_ca_path).
      - On a Proxmox node it is C(/etc/pve/pve-root-ca.pem). Without it, the controller's trusted authorities decide.
        The certificate is always verified. No variable of the environment (C(REQUESTS_CA_BUNDLE), C(CURL_CA_BUNDLE),
        C(SSL_CERT_FILE)) takes this option's place.
    type: path
  api_fingerprint:
    description:
      - SHA-256 fingerprint of the API's certificate, as C(pvenode cert info) shows it, with or without colons. Role
        variable C(pve_api_fingerprint).
      - Only a server with exactly this certificate is spoken to, whatever its name and whoever signed it; with
        O(api_ca_path) too, both must hold.
    type: str
  api_timeout:
    description: Seconds one API call may take until its answer begins, a read three times. Role variable
      C(pve_api_timeout).
    type: int
    default: 30
  lock_timeout:
    description: Seconds a change is retried while the container is locked, by a backup for instance. Role variable
      C(pve_lock_timeout).
    type: int
    default: 60
  task_timeout:
    description: Seconds one task, such as creating a container, is followed. It goes on after that, and the next run
      takes it up. Role variable C(pve_task_timeout).
    type: int
    default: 600
  node:
    description: Name of the Proxmox node the container lives on. Role variable C(pve_node).
    type: str
    required: true
  root_via:
    description:
      - The way keys take that Proxmox lets nobody but C(root@pam) itself set, no token either. They are device
        passthrough, bind mounts, hook scripts, features other than nesting, and every feature of a privileged
        container.
      - Not needed where the API identity is V(root@pam) by O(api_password). Role variable C(pve_root_via).
    type: str
    default: none
    choices:
      none: There is none; a declaration that needs it fails before anything is changed.
      local: C(pvesh) on this machine, which is the node, as root.
      ssh: C(pvesh) on the node over ssh, see O(root_ssh).
  root_ssh:
    description: How O(root_via=ssh) reaches the node. The host key is always verified. Role variable C(pve_root_ssh).
    type: dict
    suboptions:
      host:
        description: Name or address; O(api_host) if not given.
        type: str
      port:
        description: Port; ssh's own setting if not given.
        type: int
      user:
        description: User, which must be root on the node.
        type: str
        default: root
      key_file:
        description: Private key file.
        type: path
      known_hosts_file:
        description: File that holds the node's host key; ssh's own if not given.
        type: path
  unavailable_ok:
    description:
      - In check mode alone, an API that cannot be reached is no failure, but the prediction that everything is to
        be done.
      - For a node that the same deployment brings up. Role variable C(pve_api_unavailable_ok).
    type: bool
    default: false
  declared_as:
    description: What messages call O(container); the role says V(launchproof_container).
    type: str
    default: container
requirements:
  - proxmoxer >= 2.0
  - requests
notes:
  - On the controller (C(delegate_to=localhost)) the module runs within Ansible's own process, by whose Python the libraries are then
    looked for. With C(become), C(environment), C(async) or another connection, and where Ansible's Python lacks them, it is a process of
    its own as any module, by C(ansible_python_interpreter).
"""

    # The declaration of a container
    CONTAINER = r"""
options:
  container:
    description:
      - What the container is to be. An option that is not given is not managed.
      - A list, and O(container.features), are managed as a whole, so that what they do not name is removed. An empty
        text removes its key.
    type: dict
    required: true
    suboptions:
      vmid:
        description: Its number, from 100.
        type: int
        required: true
      hostname:
        description: Host name.
        type: str
      description:
        description: Notes, shown in the web interface.
        type: str
      template:
        description:
          - Volume of the template it is created from, such as V(local:vztmpl/debian-12.tar.zst). Used at creation
            alone.
        type: str
      storage:
        description: Storage of the root disk. Used at creation; a root disk is never moved.
        type: str
      disk_gib:
        description: Size of the root disk in GiB. It can grow, never shrink.
        type: int
      unprivileged:
        description:
          - Whether root inside is an unprivileged user of the node. Settled at creation, where V(true) is the
            default.
        type: bool
      cores:
        description: Number of cores it sees.
        type: int
      cpulimit:
        description: Share of CPU time in cores; V(0) is no limit.
        type: float
      cpuunits:
        description: Weight of its CPU time.
        type: int
      memory:
        description: Memory in MiB.
        type: int
      swap:
        description: Swap in MiB.
        type: int
      onboot:
        description: Whether it starts with the node.
        type: bool
      startup:
        description: Order and delays at the node's start, such as V(order=2,up=10).
        type: str
      protection:
        description: Whether Proxmox refuses to remove it or its disks.
        type: bool
      nameserver:
        description: Addresses of its name servers, separated by blanks or commas.
        type: str
      searchdomain:
        description: Its DNS search domains, separated by blanks or commas.
        type: str
      timezone:
        description: Its time zone, or V(host).
        type: str
      hookscript:
        description: Volume of a hook script. Root-only.
        type: str
      tty:
        description: Number of terminals it has.
        type: int
      console:
        description: Whether it has a console device.
        type: bool
      cmode:
        description: What the web interface's console opens, a terminal, the console device or a shell.
        type: str
        choices: [tty, console, shell]
      debug:
        description: Whether its starts are logged in detail.
        type: bool
      pool:
        description:
          - Pool it is put into at creation. Rights on the pool do for what is in it.
          - Used at creation alone. A container that is there is not moved, and nobody looks whether it is in that pool;
            to move it, C(pvesh set /pools/POOL --vms VMID --allow-move 1) on the node.
        type: str
      tags:
        description: Tags; V(launchproof), the mark of a container this collection may change, is always added.
        type: list
        elements: str
      features:
        description:
          - Features; all but O(container.features.nesting) are root-only, and on a privileged container that one
            too.
        type: dict
        suboptions:
          nesting:
            description: Lets it use namespaces as systemd's sandbox settings need them.
            type: bool
          keyctl:
            description: Allows the keyctl system call in an unprivileged container.
            type: bool
          fuse:
            description: Allows FUSE file systems.
            type: bool
          mknod:
            description: Allows an unprivileged container to make device nodes.
            type: bool
          force_rw_sys:
            description: Mounts /sys writable in an unprivileged container.
            type: bool
          mount:
            description: File system types it may mount.
            type: list
            elements: str
      networks:
        description: Its network interfaces.
        type: list
        elements: dict
        suboptions:
          name:
            description: Name inside, by which an interface is known again.
            type: str
            required: true
          bridge:
            description: Bridge on the node.
            type: str
            required: true
          ip:
            description: IPv4 address with prefix, V(dhcp) or V(manual).
            type: str
          gw:
            description: IPv4 gateway.
            type: str
          ip6:
            description: IPv6 address with prefix, V(auto), V(dhcp) or V(manual).
            type: str
          gw6:
            description: IPv6 gateway.
            type: str
          hwaddr:
            description: MAC address; the one it has is kept if not given.
            type: str
          firewall:
            description: Whether Proxmox's firewall filters it.
            type: bool
          mtu:
            description: MTU in bytes.
            type: int
          rate:
            description: Rate limit in MB/s.
            type: float
          tag:
            description: VLAN.
            type: int
          trunks:
            description: VLANs that pass through it.
            type: list
            elements: int
          link_down:
            description: Whether its cable is unplugged.
            type: bool
          host_managed:
            description: Whether Proxmox sets its addresses from outside (Proxmox VE 9.1).
            type: bool
      devices:
        description: Devices of the node passed through to it. Root-only.
        type: list
        elements: dict
        suboptions:
          path:
            description: Device node, by which a device is known again.
            type: path
            required: true
          mode:
            description: Octal access mode inside, quoted, such as V("0666"). Proxmox's own default is V(0660).
            type: str
          uid:
            description: Owner inside.
            type: int
          gid:
            description: Group inside.
            type: int
          deny_write:
            description: Whether writing to it is refused.
            type: bool
      mounts:
        description: Mount points.
        type: list
        elements: dict
        suboptions:
          target:
            description: Path inside, by which a mount point is known again.
            type: str
            required: true
          source:
            description: Path on the node, for a bind mount. Root-only.
            type: str
          storage:
            description: Storage of a volume of its own, with O(container.mounts[].size_gib).
            type: str
          size_gib:
            description: Size of the volume in GiB. It can grow, never shrink.
            type: int
          read_only:
            description: Whether it is mounted read-only.
            type: bool
          backup:
            description: Whether backups hold the volume.
            type: bool
          acl:
            description: Whether it has POSIX access control lists.
            type: bool
          quota:
            description: Whether it has disk quotas.
            type: bool
          replicate:
            description: Whether storage replication includes it, as it does by default.
            type: bool
          shared:
            description: Whether its source is there on every node.
            type: bool
          keepattrs:
            description: Whether the mount takes over owner and mode of the folder that it covers (Proxmox VE 9.1).
            type: bool
          mountoptions:
            description: Mount options.
            type: list
            elements: str
            choices: [discard, lazytime, noatime, nodev, noexec, nosuid]
          idmap:
            description: Mapping of user and group ids for this mount, V(passthrough) or such as V(u:0:100000:65536)
              (Proxmox VE 9.1).
            type: str
      ssh_public_keys:
        description: Public keys for root's login. Used at creation alone; other keys later, or keys for a container made without, are refused.
        type: list
        elements: str
      password:
        description: Password of root. Used at creation alone; another one later, or the first, is refused, see the module's notes.
        type: str
"""

"""What to do where programs cannot be isolated."""

from __future__ import annotations

_INSTEAD = (
    "Otherwise set sandbox.backend to the URL of a SandboxFusion server; or, on a machine that may"
    " be lost, to unsafe-subprocess"
)
NO_BWRAP = (
    "bubblewrap is not installed (no bwrap on PATH), and code that a model wrote does not run"
    " without isolation. Install version 0.8 or newer (Debian, Ubuntu: apt-get install bubblewrap;"
    f" Fedora: dnf install bubblewrap; Arch: pacman -S bubblewrap). {_INSTEAD}"
)
_APPARMOR = """\
This machine lets no program make user namespaces but those that AppArmor knows (Ubuntu 24.04). As
root, write /etc/apparmor.d/bwrap:

  abi <abi/4.0>,
  include <tunables/global>
  profile bwrap /usr/bin/bwrap flags=(unconfined) {
    userns,
  }

and load it: apparmor_parser -r /etc/apparmor.d/bwrap"""
_CONTAINER = """\
In a container, its own seccomp filter is in the way. Docker: --security-opt seccomp=unconfined
--security-opt systempaths=unconfined (or a profile that allows unshare, clone with namespaces,
mount, pivot_root); Kubernetes: securityContext.seccompProfile Unconfined, procMount Unmasked. On a
bare machine, user namespaces are off: sysctl user.max_user_namespaces,
kernel.unprivileged_userns_clone"""
# What bwrap says, and what helps. The first that fits.
_CURES = (
    ("setting up uid map: Permission denied", _APPARMOR),
    ("RTM_NEWADDR", _APPARMOR),
    ("Unknown option", "This bubblewrap is too old: 0.8 or newer is needed"),
    ("mount proc", _CONTAINER),
    ("namespace", _CONTAINER),
    ("Operation not permitted", _CONTAINER),
    (
        "Can't find source path",
        "Where you are root, programs run as users of their own: these must be able to read the"
        " folders of sandbox.python",
    ),
    ("Permission denied", _APPARMOR),
)


def advice(said: str) -> str:
    """A message about a bwrap that failed, with what helps.

    Args:
        said: its own words.
    """
    said = said.strip() or "it said nothing"
    cure = next((cure for words, cure in _CURES if words in said), "")
    return f"bubblewrap does not work here: {said}\n" + (f"{cure}\n" if cure else "") + _INSTEAD

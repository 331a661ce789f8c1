"""Where Chromium is, and how it is started."""

import os
import shutil

from openclaw_rl.config.options import ConfigError

#: The variable that names Chromium, and the names that it is looked for by.
VARIABLE = "CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = f"The environment browser needs Chromium: install it (Debian: apt install chromium), or set {VARIABLE} to it."
#: The memory that the scripts of a page may take, in MiB; a page that wants more crashes.
MAX_SCRIPT_MIB = 512
#: Nothing is looked up by name, nothing goes past the proxy, and nothing waits for a small /dev/shm.
FLAGS = (
    f"--js-flags=--max-old-space-size={MAX_SCRIPT_MIB}",
    "--disable-dev-shm-usage",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def find_chromium() -> str:
    """The path of Chromium. Raises ConfigError."""
    if given := os.environ.get(VARIABLE):
        if found := shutil.which(given):
            return found
        raise ConfigError(f"{VARIABLE}={given} is not a program.")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise ConfigError(MISSING)
    return found


def has_own_sandbox() -> bool:
    """Whether Chromium's own sandbox can be used: it refuses to run with it as root."""
    return os.geteuid() != 0

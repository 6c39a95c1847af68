"""Known vulnerabilities of every version that constraints.txt names, by pip-audit.

It ends with 1 when there are some, and with 2 when it could not be known: an audit that asked nobody found nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(ROOT / "constraints.txt")]
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    done = subprocess.run([*command, *options, *sys.argv[1:]], capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        _end(2, f"the audit could NOT run: {why[:500]}")
    skipped = [one for one in found if "skip_reason" in one]
    for one in found:
        for known in one.get("vulns", ()):
            fixed = ", ".join(known["fix_versions"]) or "none yet"
            names = ", ".join((known["id"], *known["aliases"]))
            sys.stdout.write(f"{one['name']} {one['version']}: {names}; fixed in {fixed}\n")
    vulnerable = [one for one in found if one.get("vulns")]
    if skipped:
        names = ", ".join(one["name"] for one in skipped[:5]) + (", …" if len(skipped) > 5 else "")
        _end(
            2,
            f"{len(skipped)} of {len(found)} packages could NOT be audited ({names}), {len(vulnerable)} others are "
            f"vulnerable. {skipped[0]['skip_reason']} Run it where the vulnerability service can be reached.",
        )
    if vulnerable:
        _end(1, f"{len(vulnerable)} of {len(found)} packages are vulnerable: raise them in constraints.txt.")
    _end(0, f"no known vulnerability in {len(found)} packages.")


def _end(code: int, words: str) -> None:
    sys.stdout.write(f"audit: {words}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()

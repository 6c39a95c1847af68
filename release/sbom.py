"""The software bill of materials of an environment, as CycloneDX JSON: the same environment gives the same bytes.

python release/sbom.py ENVIRONMENT FILE
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    environment, out = sys.argv[1:]
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON"]
    # Without SOURCE_DATE_EPOCH the bill has no time, and so no serial number either.
    more = ["--pyproject", str(ROOT / "pyproject.toml"), environment]
    bill = json.loads(subprocess.run([*command, *more], check=True, stdout=subprocess.PIPE).stdout)
    for one in bill["components"]:  # where an editable install lies is nobody's concern
        kept = [link for link in one.get("externalReferences", ()) if not link["url"].startswith("file:")]
        one["externalReferences"] = kept
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"sbom: {len(bill['components'])} packages in {path}\n")


if __name__ == "__main__":
    main()

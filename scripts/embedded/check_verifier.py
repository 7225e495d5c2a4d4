"""The shapes verifier against ground truth; exit code 1 when it misses its goals.

python scripts/embedded/check_verifier.py [SCENES]
"""

import sys

from flowrl.shapes.agreement import measure


def main() -> int:
    scenes = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    result = measure(scenes)
    print(result)
    print("blurred:", measure(scenes, seed=1, blur=True))
    return 0 if result.accepted >= 0.995 and min(result.rejected.values()) >= 0.99 else 1


if __name__ == "__main__":
    sys.exit(main())

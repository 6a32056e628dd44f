"""Serves the training flow as a Prefect deployment, as people do who start and stop runs in Prefect's pages.

python -m tests.integration.serve_train NAME
"""

import sys

if __name__ == "__main__":
    from flows.train import train

    train.serve(name=sys.argv[1], print_starting_message=False)

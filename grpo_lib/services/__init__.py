"""Services that a run may use, started and supervised here: Prefect, MLflow and a Ray cluster."""

#!/bin/sh
# Roles and databases of Prefect and MLflow, made once, when PostgreSQL starts with an empty folder. Each role can open
# its own databases only. Needs PREFECT_DB_PASSWORD and MLFLOW_DB_PASSWORD.
set -eu
# psql's \getenv and %L: no password is on a command line, and any character may be in it.
psql --no-psqlrc --set ON_ERROR_STOP=1 --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'SQL'
\getenv prefect_password PREFECT_DB_PASSWORD
\getenv mlflow_password MLFLOW_DB_PASSWORD
CREATE ROLE prefect LOGIN PASSWORD :'prefect_password';
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow_password';
CREATE DATABASE prefect OWNER prefect;
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_auth OWNER mlflow;
REVOKE CONNECT ON DATABASE postgres, template1, prefect, mlflow, mlflow_auth FROM PUBLIC;
SQL

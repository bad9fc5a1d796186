"""Seeds of environments of OpenEnv as rows; their episodes are run and scored by `rollout.gateway.openenv_source`."""

"""The typed configuration: schema, composition from `configs/`, validation, the plan of a run. Imports no torch."""

"""The settings of `edited_hf`: editing, loading, the harness's own, the plan of edits and their sources."""

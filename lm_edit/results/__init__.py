"""Results of lm-eval as data: tables, cases, checks and exports; and judging saved answers again."""

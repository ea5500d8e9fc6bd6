"""The leaderboard: runs as rows, scores as columns, with intervals, paired tests and the answers behind each number."""

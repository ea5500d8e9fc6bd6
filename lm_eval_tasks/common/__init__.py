"""What every benchmark folder shares: reading records, asking probes, scoring answers, aggregating cases."""

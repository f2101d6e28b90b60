"""Operations on whole runs: copy and remove."""

"""What tests share: engines, deployments, attackers and loads."""

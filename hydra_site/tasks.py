"""The site's own tasks, on the queue `control`: broker users that a restart forgot, and hosts that leave."""

import logging

from celery import shared_task

from engines import leaving
from hydra_site import host_grants
from pools import host_services
from pools.errors import JoinError

logger = logging.getLogger(__name__)


@shared_task(ignore_result=True)
def restore_broker_users() -> None:
    """A broker without an ACL file forgets its users when it restarts."""
    try:
        restored = host_grants.restore_broker_users()
    except JoinError as error:
        logger.warning("broker users of hosts cannot be restored: %s %s", error.message, error.hint)
        return
    if restored:
        logger.info("made %d broker users of hosts again", restored)


@shared_task(ignore_result=True)
def finish_retirements() -> None:
    """Let hosts go that retire and have no engine any more; a lost one has none that anybody could reach."""
    lost = set(host_services.lost_host_names())
    for host_id, name in host_services.retiring_hosts():
        if name not in lost and not leaving.is_empty(host_id):
            continue
        try:
            host_grants.revoke(host_id)
        except JoinError as error:
            logger.warning("host %s cannot leave yet: %s %s", name, error.message, error.hint)
            continue
        if host_services.finish_retirement(host_id):
            leaving.let_go(host_id)
            logger.info("host %s has left", name)

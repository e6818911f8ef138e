"""Jobs in the admin: what one was asked for, how far it is, and why it failed."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.test import Client

from pools import jobs
from pools.choices import JobKind
from tests.panel.page import SmallPool

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_jobs_page_says_how_far_it_is_and_why_it_failed(small_pool: SmallPool, admin: User, client: Client) -> None:
    client.force_login(admin)
    job_id = jobs.enqueue("atlas", JobKind.BUILD, "sm_86")
    assert jobs.claim(job_id, "atlas")
    assert jobs.progress(job_id, "compiling", 103, 412)
    path = f"/admin/pools/job/{job_id}/change/"
    assert "25 % of 412 steps compiling" in client.get(path).content.decode()
    assert jobs.fail(job_id, "nvcc ran out of memory.", "Give the build more memory.")
    page = client.get(path).content.decode()
    assert "nvcc ran out of memory." in page and "Give the build more memory." in page and "failed" in page
    assert "nvcc" not in client.get("/admin/pools/job/add/").content.decode()


def test_who_asks_for_a_job_is_asked_only_for_what_he_wants(small_pool: SmallPool, admin: User, client: Client) -> None:
    client.force_login(admin)
    page = client.get("/admin/pools/job/add/").content.decode()
    assert all(f'name="{name}"' in page for name in ("host", "kind", "subject", "name"))
    assert "Ended at" not in page
    form = {"host": small_pool.host.pk, "kind": "build", "subject": "sm_120,sm_60", "name": ""}
    assert client.post("/admin/pools/job/add/", form).status_code == 302
    (job,) = jobs.job_views("atlas")
    assert (job.kind, job.subject, job.state) == ("build", "sm_60 sm_120", "queued")

"""A lease tells where its session's next turn is wanted, so that a warm turn asks the database once."""

from importlib import import_module

from django.db import migrations

_BEFORE = import_module("sessions.migrations.0006_lease_follows_its_stream").LEASE.replace("CREATE OR REPLACE", "CREATE")
_NO_LEASE = import_module("sessions.migrations.0003_leases_and_explanations").NO_LEASE
# What a function returns cannot be changed, so it is made anew.
LEASE = """
CREATE FUNCTION hydra_lease(
    p_request uuid, p_session text, p_owner text, p_engines bigint[], p_limits integer[], p_idempotency text, p_lasts interval
) RETURNS TABLE (outcome text, leased_engine bigint, others integer, wanted_engine bigint) LANGUAGE plpgsql AS $$
DECLARE
    v_home bigint;
    v_taken integer;
    v_wanted bigint;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    IF p_idempotency <> '' THEN
        PERFORM pg_advisory_xact_lock(hashtextextended(p_idempotency, 7002));
        IF EXISTS (
            SELECT 1 FROM hydra_sessions_slotlease l
            WHERE l.idempotency = p_idempotency AND l.expires_at >= clock_timestamp() AND l.request_id <> p_request
        ) THEN
            RETURN QUERY SELECT 'duplicate'::text, NULL::bigint, 0, NULL::bigint;
            RETURN;
        END IF;
    END IF;
    IF p_session <> '' THEN
        PERFORM pg_advisory_xact_lock(hashtextextended(p_session, 7001));
        SELECT l.engine_id INTO v_home FROM hydra_sessions_slotlease l
        WHERE l.session = p_session AND l.expires_at >= clock_timestamp() AND l.request_id <> p_request
            AND l.engine_id = ANY (p_engines)
        ORDER BY l.created_at DESC LIMIT 1;
        SELECT c.wanted_engine_id INTO v_wanted FROM hydra_sessions_chatsession c WHERE c.key_hash = p_session;
    END IF;
    FOR i IN 1 .. cardinality(p_engines) LOOP
        CONTINUE WHEN v_home IS NOT NULL AND p_engines[i] <> v_home;
        SELECT count(*) INTO v_taken FROM hydra_sessions_slotlease l
        WHERE l.engine_id = p_engines[i] AND l.expires_at >= clock_timestamp() AND l.request_id <> p_request;
        IF v_taken < p_limits[i] THEN
            INSERT INTO hydra_sessions_slotlease AS l
                (request_id, session, engine_id, owner, idempotency, created_at, expires_at)
            VALUES (p_request, p_session, p_engines[i], p_owner, p_idempotency, clock_timestamp(), clock_timestamp() + p_lasts)
            ON CONFLICT (request_id) DO UPDATE
                SET owner = excluded.owner, engine_id = excluded.engine_id, expires_at = excluded.expires_at;
            RETURN QUERY SELECT 'leased'::text, p_engines[i], v_taken, v_wanted;
            RETURN;
        END IF;
    END LOOP;
    RETURN QUERY SELECT 'busy'::text, NULL::bigint, 0, v_wanted;
END $$;
"""


class Migration(migrations.Migration):

    dependencies = [
        ("hydra_sessions", "0007_turns_by_start"),
    ]

    operations = [
        migrations.RunSQL(_NO_LEASE + LEASE, _NO_LEASE + _BEFORE),
    ]

"""Django's settings. What a user may set stands in `hydra_site.env`; this module only passes it on."""

from pathlib import Path
from typing import Any

import plotly
from django.templatetags.static import static

from engines.browser_guard import is_loopback
from hydra_site import addresses, env
from hydra_site.joinable import why_not_joinable
from hydra_site.supervisor.home import Home
from hydra_site.supervisor.joined import Joined

BASE_DIR = Path(__file__).resolve().parent.parent

_home = Home(env.path("HYDRA_HOME"))
_home.create()

HYDRA_HOME = _home.root
HYDRA_BIND = env.address("HYDRA_BIND")
HYDRA_PORT = env.port("HYDRA_PORT")
_joined = Joined.of(_home)
HYDRA_HOST_NAME = _joined.host_name if _joined else env.host_name()
HYDRA_ENGINE_HOST = _joined.address if _joined else env.engine_host()
# Why other machines cannot join, or "".
HYDRA_NOT_JOINABLE = why_not_joinable(env.database_url(), env.broker_url())
HYDRA_MAX_BODY_BYTES = env.count("HYDRA_MAX_BODY_BYTES", minimum=1)
HYDRA_SOURCE_URL = env.text("HYDRA_SOURCE_URL")
HYDRA_STORE_BYTES = env.store_bytes()
HYDRA_STORE_DISK_BYTES = env.count("HYDRA_STORE_DISK_BYTES")
HYDRA_SESSION_RETENTION_DAYS = env.session_retention_days()
HYDRA_LOG_LEVEL = env.log_level()

DEBUG = False
SECRET_KEY = _home.secrets().django_secret_key
# Beyond loopback anybody may have given this machine a name.
ALLOWED_HOSTS = ["localhost", ".localhost", "127.0.0.1", "[::1]"] if is_loopback(HYDRA_BIND) else ["*"]

INSTALLED_APPS = [
    "daphne",
    "unfold",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "servestatic",
    "django.contrib.staticfiles",
    "channels",
    "pools",
    "engines",
    "sessions",
    "hydra_site",
]

# Pages only: the API and the health checks have a chain of their own, see hydra_site/asgi.py.
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "servestatic.middleware.ServeStaticMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "hydra_site.urls"
ASGI_APPLICATION = "hydra_site.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "hydra_site.context.panel",
            ]
        },
    }
]

DATABASES: dict[str, dict[str, Any]] = {"default": addresses.database_settings(addresses.database_url(_home))}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

_broker_url = addresses.broker_url(_home)
CHANNEL_LAYERS = (
    {
        "default": {
            "BACKEND": "channels_redis.core.RedisChannelLayer",
            "CONFIG": addresses.channel_layer_config(_broker_url),
        }
    }
    if _broker_url
    else {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}
)

# Without a known broker nothing listens on this port, and whoever sends gets an error at once.
CELERY_BROKER_URL = _broker_url or "redis://127.0.0.1:1/0"
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# Messages that a worker has taken and not finished lie under keys of its own host: a broker user can reach no other's.
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "socket_connect_timeout": 3,
    "socket_timeout": 15,
    "socket_keepalive": True,
    "unacked_key": f"unacked.{HYDRA_HOST_NAME}.messages",
    "unacked_index_key": f"unacked.{HYDRA_HOST_NAME}.index",
    "unacked_mutex_key": f"unacked.{HYDRA_HOST_NAME}.mutex",
}
CELERY_TASK_PUBLISH_RETRY_POLICY = {"max_retries": 2, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5}
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_DEFAULT_QUEUE = "control"
CELERY_TASK_TIME_LIMIT = 120
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
CELERY_BEAT_SCHEDULE = {
    "probe-hosts": {"task": "engines.tasks.probe_hosts", "schedule": 5.0, "options": {"expires": 5}},
    "reconcile": {"task": "engines.tasks.reconcile", "schedule": 5.0, "options": {"expires": 5}},
    "sweep-hosts": {"task": "pools.tasks.sweep_hosts", "schedule": 2.0, "options": {"expires": 2}},
    "sweep-reservations": {"task": "pools.tasks.sweep_reservations", "schedule": 10.0, "options": {"expires": 10}},
    "sweep-minutes": {"task": "pools.tasks.sweep_minutes", "schedule": 600.0, "options": {"expires": 600}},
    "broker-users": {"task": "hydra_site.tasks.restore_broker_users", "schedule": 15.0, "options": {"expires": 15}},
    "retirements": {"task": "hydra_site.tasks.finish_retirements", "schedule": 5.0, "options": {"expires": 5}},
    "sweep-stores": {"task": "sessions.tasks.sweep_stores", "schedule": 15.0, "options": {"expires": 15}},
    "expire-sessions": {"task": "sessions.tasks.expire_sessions", "schedule": 600.0, "options": {"expires": 600}},
    "sweep-jobs": {"task": "pools.tasks.sweep_jobs", "schedule": 20.0, "options": {"expires": 20}},
    "sweep-leases": {"task": "sessions.tasks.sweep_leases", "schedule": 30.0, "options": {"expires": 30}},
    "sweep-handoffs": {"task": "sessions.tasks.sweep_handoffs", "schedule": 30.0, "options": {"expires": 30}},
    "sweep-drains": {"task": "sessions.tasks.sweep_drains", "schedule": 10.0, "options": {"expires": 10}},
    "kv-loss": {"task": "sessions.tasks.measure_kv_loss", "schedule": 20.0, "options": {"expires": 20}},
    "sweep-turns": {"task": "sessions.tasks.sweep_turns", "schedule": 300.0, "options": {"expires": 300}},
}

LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "dashboard"
LOGOUT_REDIRECT_URL = "login"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
DATA_UPLOAD_MAX_MEMORY_SIZE = HYDRA_MAX_BODY_BYTES

STATIC_URL = "/static/"
# Served from where they lie, so that nothing has to be collected. Plotly's script comes out of its Python package.
STATICFILES_DIRS = [BASE_DIR / "static", ("vendor", Path(plotly.__file__).parent / "package_data")]
STATICFILES_FINDERS = [
    "django.contrib.staticfiles.finders.FileSystemFinder",
    "django.contrib.staticfiles.finders.AppDirectoriesFinder",
]
SERVESTATIC_USE_FINDERS = True
SERVESTATIC_USE_STATIC_ROOT = False
SERVESTATIC_ALLOW_ALL_ORIGINS = False

LANGUAGE_CODE = "en"
USE_I18N = False
TIME_ZONE = "UTC"
USE_TZ = True

UNFOLD = {
    "SITE_TITLE": "Hydra",
    "SITE_HEADER": "Hydra",
    "SITE_SUBHEADER": "Every row of the pool",
    "SITE_URL": "/",
    "SITE_SYMBOL": "hub",
    "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": lambda request: static("img/hydra.svg")}],
    # The panel's accent (static/css) as lighter and darker steps.
    "COLORS": {
        "primary": {
            "50": "236 247 251",
            "100": "208 235 244",
            "200": "165 215 232",
            "300": "110 188 214",
            "400": "58 157 190",
            "500": "24 129 164",
            "600": "11 109 144",
            "700": "10 89 118",
            "800": "12 73 96",
            "900": "13 60 79",
            "950": "7 38 52",
        }
    },
    "SHOW_VIEW_ON_SITE": False,
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": HYDRA_LOG_LEVEL},
    "loggers": {
        # Django's own handlers would write each line twice, or mail it.
        "django": {"handlers": [], "level": "INFO", "propagate": True},
        "django.server": {"handlers": [], "propagate": True},
        "daphne": {"level": "WARNING"},
        "celery": {"level": "WARNING"},
        "celery.beat": {"level": "WARNING"},
    },
}

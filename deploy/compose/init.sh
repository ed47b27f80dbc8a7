# Runs in the service `init` as root: makes what the other services need to trust one another, for the user USER:GROUP.
#
#   sh init.sh USER:GROUP
#
# The CA's key stays in a volume of its own. A password is made once. Certificates and the rights of Redis' user, which
# an upgrade may change, are written anew at every start.
set -eu
umask 077
owner=$1
tandem certs init /authority redis
mkdir -p /run/tandem/certs
for name in ca.crt service.crt service.key client.crt client.key; do
    cp "/authority/$name" /run/tandem/certs/
done
if [ ! -e /run/tandem/redis_url ]; then
    password=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
    url="rediss://tandem:$password@redis:6379/0?ssl_ca_certs=/run/tandem/certs/ca.crt"
    printf '%s\n' "$url" >/run/tandem/redis_url
fi
digest=$(python3 - /run/tandem/redis_url <<'PYTHON'
import hashlib, pathlib, sys, urllib.parse
url = urllib.parse.urlsplit(pathlib.Path(sys.argv[1]).read_text().strip())
print(hashlib.sha256(urllib.parse.unquote(url.password).encode()).hexdigest())
PYTHON
)
sed "s/PASSWORD_SHA256/$digest/" /users.acl >/run/tandem/users.acl
chown -R "$owner" /run/tandem /data /prometheus

# Runs in the service `init` as root: makes what the other services need to trust one another, for the user USER:GROUP.
#
#   sh init.sh USER:GROUP
#
# The CA's key stays in a volume of its own. Certificates are renewed at every start; a password is made once.
set -eu
umask 077
owner=$1
tandem certs init /authority redis
mkdir -p /run/tandem/certs
for name in ca.crt service.crt service.key client.crt client.key; do
    cp "/authority/$name" /run/tandem/certs/
done
if [ ! -e /run/tandem/redis_url ] || [ ! -e /run/tandem/users.acl ]; then
    password=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
    digest=$(printf %s "$password" | sha256sum | cut -d' ' -f1)
    sed "s/PASSWORD_SHA256/$digest/" /users.acl >/run/tandem/users.acl
    url="rediss://tandem:$password@redis:6379/0?ssl_ca_certs=/run/tandem/certs/ca.crt"
    printf '%s\n' "$url" >/run/tandem/redis_url
fi
chown -R "$owner" /run/tandem /data /prometheus
